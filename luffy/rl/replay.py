"""The policy's own successes, kept for later steps: ExGRPO (arXiv 2510.02245)."""

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from typing import Any

from luffy.config.objective import ReplayConfig
from luffy.errors import CheckpointError
from luffy.rl.draws import uniform
from luffy.types import Group, Trajectory

MAX_SUCCESSES = 8
"""Successes kept for each prompt, the newest. The paper's code has no bound; but each costs a forward pass whenever the
prompt is replayed, and the older it is, the farther the policy has moved from the weights that sampled it."""


ReadGroup = Callable[[int, int], Group | None]
"""The group of a step (from 1) at a place in it (from 0), as it was observed; None where it is lost."""


@dataclass(frozen=True, slots=True)
class _Success:
    """The place of a right rollout in the journal, and a digest that tells equal responses."""

    step: int
    group: int
    row: int
    digest: str


@dataclass(slots=True)
class _Experience:
    """One prompt in the buffer."""

    share_correct: float
    """Share of correct rollouts in its last group."""
    successes: list[_Success] = field(default_factory=list)
    """The newest last."""


class ReplayBuffer:
    """Which prompts can be replayed, and with which of their stored successes.

    A prompt is replayable when some of the rollouts of its *last* group were right: the paper buckets by the latest
    rate, and its code by 0 < k. A prompt that has since failed altogether waits with its successes until it is solved
    again (the code leaves it in its old bucket instead). One whose rollouts were all right is retired for good where
    `config.retire_solved`. A replayed row is no rollout and does not count (in the code it does, so that a replayed
    prompt seems never to fail).

    Recording begins with the step after the first whose share of correct rollouts is above `config.start_accuracy`, as
    in the paper's code. What the buffer holds is a pure function of the groups it has observed, and it holds places,
    not rows: the responses stay in the rollout journal, where `read` finds them when they are replayed.
    """

    def __init__(self, config: ReplayConfig, seed: int, read: ReadGroup) -> None:
        self._config = config
        self._seed = seed
        self._read = read
        self._started = False
        self._experience: dict[str, _Experience] = {}
        self._retired: set[str] = set()

    def observe(self, step: int, groups: Sequence[Group]) -> None:
        """Record a step: all of its groups, before any filter, in order; groups without rollouts are left out."""
        if not self._started:
            self._started = _accuracy(groups) > self._config.start_accuracy
            return
        for index, group in enumerate(groups):
            if group.rollouts and group.uid not in self._retired:
                self._record(group, step, index)

    def draw(self, step: int, count: int) -> list[str]:
        """Up to `count` different prompts for `step`, a pure function of what was observed.

        A bucket (all prompts of one share correct) is sampled in proportion to the normal density at its share, not to
        its size; then a prompt of it, uniformly. Empty buckets are left out.
        """
        buckets = self._buckets()
        chosen: list[str] = []
        while buckets and len(chosen) < count:
            place = len(chosen)
            share = self._share(list(buckets), uniform(self._seed, "replay", step, place, "bucket"))
            index = int(uniform(self._seed, "replay", step, place, "prompt") * len(buckets[share]))
            chosen.append(buckets[share].pop(index))
            if not buckets[share]:
                del buckets[share]
        return chosen

    def candidates(self, uid: str) -> list[Trajectory]:
        """The stored successes of a prompt to replay, the newest last, as they were sampled.

        Raises CheckpointError when the journal has lost one of them.
        """
        return [self._row(success) for success in self._experience[uid].successes]

    def state(self) -> dict[str, object]:
        """Everything, in types that JSON gives back exactly."""
        return {
            "started": self._started,
            "retired": sorted(self._retired),
            "experience": {
                uid: {"share_correct": known.share_correct, "successes": [list(astuple(s)) for s in known.successes]}
                for uid, known in self._experience.items()
            },
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take the state of a checkpoint in place of the present one."""
        self._started = state["started"]
        self._retired = set(state["retired"])
        self._experience = {
            uid: _Experience(known["share_correct"], [_Success(*success) for success in known["successes"]])
            for uid, known in state["experience"].items()
        }

    def _record(self, group: Group, step: int, index: int) -> None:
        if group.accuracy == 1.0 and self._config.retire_solved:
            self._retired.add(group.uid)
            self._experience.pop(group.uid, None)
            return
        known = self._experience.get(group.uid)
        successes = [
            _Success(step, index, place, _digest(row))
            for place, row in enumerate(group.trajectories)
            if row.is_correct and not row.is_off_policy
        ]
        if known is None and successes:
            known = self._experience[group.uid] = _Experience(group.accuracy)
        if known is not None:
            known.share_correct = group.accuracy
            known.successes = _newest_different([*known.successes, *successes])

    def _row(self, success: _Success) -> Trajectory:
        group = self._read(success.step, success.group)
        if group is None:
            raise CheckpointError(
                f"the rollout journal has lost step {success.step}, which the replay buffer needs; "
                "delete the checkpoints to start the stage anew"
            )
        row = group.trajectories[success.row]
        assert not any(map(math.isnan, row.logp_behavior)), "an own rollout without its log-probabilities"
        return row

    def _buckets(self) -> dict[float, list[str]]:
        buckets: dict[float, list[str]] = {}
        for uid, known in sorted(self._experience.items()):
            if known.share_correct > 0:
                buckets.setdefault(known.share_correct, []).append(uid)
        return dict(sorted(buckets.items()))

    def _share(self, shares: Sequence[float], number: float) -> float:
        """The share whose interval of the cumulative distribution holds `number`."""
        exponents = [-0.5 * ((share - self._config.bucket_mean) / self._config.bucket_std) ** 2 for share in shares]
        # Less the largest: a lone bucket far from the mean keeps a density above 0.
        weights = [math.exp(exponent - max(exponents)) for exponent in exponents]
        target = number * sum(weights)
        for share, weight in zip(shares, weights, strict=True):
            target -= weight
            if target < 0:
                return share
        return shares[-1]


def _accuracy(groups: Sequence[Group]) -> float:
    rollouts = [row for group in groups for row in group.rollouts]
    return sum(row.is_correct for row in rollouts) / len(rollouts) if rollouts else 0.0


def _newest_different(successes: Sequence[_Success]) -> list[_Success]:
    """The newest ones; equal responses once, with the log-probabilities of the latest time they were sampled."""
    latest = {success.digest: success for success in successes}
    order = list(dict.fromkeys(success.digest for success in reversed(successes)))[:MAX_SUCCESSES]
    return [latest[digest] for digest in reversed(order)]


def _digest(row: Trajectory) -> str:
    return hashlib.blake2b(repr(row.response_ids).encode(), digest_size=16).hexdigest()

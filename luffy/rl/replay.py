"""Replay buffer of the policy's correct rollouts: ExGRPO (arXiv 2510.02245)."""

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from typing import Any

from luffy.config.objective import ReplayConfig
from luffy.errors import CheckpointError
from luffy.rl.random_numbers import uniform
from luffy.types import Group, Trajectory

MAX_SUCCESSES = 8
"""Successes kept per prompt (the newest). The paper's code has no limit, but each costs a forward pass whenever the
prompt is replayed, and the older it is, the further the policy has moved away from the weights that sampled it."""


ReadGroup = Callable[[int, int], Group | None]
"""Reads the group of a step (from 1) at an index (from 0) as it was observed; None if it is lost."""


@dataclass(frozen=True, slots=True)
class _Success:
    """The location of a correct rollout in the journal, and a digest to find equal responses."""

    step: int
    group: int
    row: int
    digest: str


@dataclass(slots=True)
class _PromptRecord:
    """One prompt in the buffer."""

    share_correct: float
    """Share of correct rollouts in its last group."""
    successes: list[_Success] = field(default_factory=list)
    """Oldest first."""


class ReplayBuffer:
    """The prompts that can be replayed, each with its stored successes.

    A prompt can be replayed when some rollouts of its *last* group were correct: the paper buckets prompts by their
    latest accuracy. If all rollouts fail later, the prompt keeps its successes but is not replayed until it is solved
    again (the paper's code leaves it in its old bucket). With `config.retire_solved`, a prompt whose rollouts were all
    correct is removed for good. Replayed rows do not count as rollouts (in the paper's code they do, so a replayed
    prompt never seems to fail).

    Recording starts after the first step whose accuracy is above `config.start_accuracy`, as in the paper's code. The
    content of the buffer is a pure function of the observed groups. With `rl.max_staleness`, a step is planned before
    the steps just ahead of it are observed; planned anew by a resumed run, it may know them. The buffer stores
    locations, not rows: the responses stay in the rollout journal, and `read` loads them when they are replayed.
    """

    def __init__(self, config: ReplayConfig, seed: int, read: ReadGroup) -> None:
        self._config = config
        self._seed = seed
        self._read = read
        self._started = False
        self._experience: dict[str, _PromptRecord] = {}
        self._retired: set[str] = set()

    def observe(self, step: int, groups: Sequence[Group]) -> None:
        """Record all groups of a step, before filtering, in order; groups without rollouts are ignored."""
        if not self._started:
            self._started = _accuracy(groups) > self._config.start_accuracy
            return
        for index, group in enumerate(groups):
            if group.rollouts and group.uid not in self._retired:
                self._record(group, step, index)

    def sample(self, step: int, count: int) -> list[str]:
        """Sample up to `count` distinct prompts for `step`; a pure function of the observed groups.

        First a bucket (all prompts with the same accuracy) is sampled in proportion to the normal density at its
        accuracy, whatever its size, and then one of its prompts uniformly.
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
        """The stored successes of a prompt, oldest first.

        Raises CheckpointError when the journal has lost one of them.
        """
        return [self._row(success) for success in self._experience[uid].successes]

    def state(self) -> dict[str, object]:
        """The buffer as plain JSON values."""
        return {
            "started": self._started,
            "retired": sorted(self._retired),
            "experience": {
                uid: {"share_correct": known.share_correct, "successes": [list(astuple(s)) for s in known.successes]}
                for uid, known in self._experience.items()
            },
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Replace the buffer with that of a checkpoint."""
        self._started = state["started"]
        self._retired = set(state["retired"])
        self._experience = {
            uid: _PromptRecord(known["share_correct"], [_Success(*success) for success in known["successes"]])
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
            known = self._experience[group.uid] = _PromptRecord(group.accuracy)
        if known is not None:
            known.share_correct = group.accuracy
            known.successes = _newest_different([*known.successes, *successes])

    def _row(self, success: _Success) -> Trajectory:
        group = self._read(success.step, success.group)
        if group is None:
            raise CheckpointError(
                f"the rollout journal has lost step {success.step}, which the replay buffer needs; "
                "delete the checkpoints to restart the stage"
            )
        row = group.trajectories[success.row]
        assert not any(map(math.isnan, row.logp_behavior)), "a rollout of the policy without its log-probabilities"
        return row

    def _buckets(self) -> dict[float, list[str]]:
        buckets: dict[float, list[str]] = {}
        for uid, known in sorted(self._experience.items()):
            if known.share_correct > 0:
                buckets.setdefault(known.share_correct, []).append(uid)
        return dict(sorted(buckets.items()))

    def _share(self, shares: Sequence[float], number: float) -> float:
        """The share whose interval of the cumulative distribution contains `number`."""
        exponents = [-0.5 * ((share - self._config.bucket_mean) / self._config.bucket_std) ** 2 for share in shares]
        # Relative to the largest exponent, so that a single bucket far from the mean keeps a weight above 0.
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
    """The newest distinct responses, oldest first; of equal ones the last, with its log-probabilities."""
    latest = {success.digest: success for success in successes}
    order = list(dict.fromkeys(success.digest for success in reversed(successes)))[:MAX_SUCCESSES]
    return [latest[digest] for digest in reversed(order)]


def _digest(row: Trajectory) -> str:
    return hashlib.blake2b(repr(row.response_ids).encode(), digest_size=16).hexdigest()

"""The policy's own successes, kept for later steps: ExGRPO (arXiv 2510.02245)."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from luffy.config.objective import ReplayConfig
from luffy.errors import CheckpointError
from luffy.rollout.draws import uniform
from luffy.types import Group, Trajectory

MAX_SUCCESSES = 8
"""Kept a prompt, the newest. The paper's code has no bound; but every one costs a forward pass whenever the prompt is
replayed and stays in memory, and the older one is, the farther the policy has moved from what drew it."""


ReadGroups = Callable[[int], Sequence[Group] | None]
"""All groups of a step, as they were observed; None where they are lost."""


@dataclass(frozen=True, slots=True)
class _Success:
    """A right rollout, and where it stands: step, place of its group there, place of its row in the group."""

    row: Trajectory
    place: tuple[int, int, int]


@dataclass(slots=True)
class _Experience:
    """What is known of one prompt."""

    share_correct: float
    """Of the rollouts of its last group."""
    successes: list[_Success] = field(default_factory=list)
    """The newest last."""


class ReplayBuffer:
    """Which prompts can be replayed, and with which of their stored successes.

    A prompt is replayable when some of the rollouts of its *last* group were right: the paper buckets by the latest
    rate, and its code by 0 < k. A prompt that has since failed altogether waits with its successes until it is solved
    again (the code leaves it in its old bucket instead). One whose rollouts were all right is retired for good where
    `config.retire_solved`. A replayed row is no rollout and does not count (in the code it does, so that a replayed
    prompt seems never to fail).

    Nothing is recorded before the first step whose share of correct rollouts is above `config.start_accuracy`; that
    step is. What the buffer holds is a pure function of the groups it has observed, so its saved state names rows
    instead of holding them: thousands of long responses stay in the rollout journal.
    """

    def __init__(self, config: ReplayConfig, seed: int) -> None:
        self._config = config
        self._seed = seed
        self._started = False
        self._experience: dict[str, _Experience] = {}
        self._retired: set[str] = set()

    def observe(self, step: int, groups: Sequence[Group]) -> None:
        """Record a step: all of its groups, before any filter, in order; groups without rollouts say nothing."""
        self._started = self._started or _accuracy(groups) > self._config.start_accuracy
        if not self._started:
            return
        for index, group in enumerate(groups):
            if group.rollouts and group.uid not in self._retired:
                self._record(group, (step, index))

    def draw(self, step: int, count: int) -> list[str]:
        """Up to `count` different prompts for `step`, a pure function of what was observed.

        A bucket (all prompts of one share correct) is drawn with probability proportional to the normal density at its
        share, whatever its size; then a prompt uniformly inside. Empty buckets are out.
        """
        buckets = self._buckets()
        drawn: list[str] = []
        while buckets and len(drawn) < count:
            place = len(drawn)
            share = self._share(list(buckets), uniform(self._seed, "replay", step, place, "bucket"))
            index = int(uniform(self._seed, "replay", step, place, "prompt") * len(buckets[share]))
            drawn.append(buckets[share].pop(index))
            if not buckets[share]:
                del buckets[share]
        return drawn

    def candidates(self, uid: str) -> list[Trajectory]:
        """The stored successes of a drawn prompt, the newest last, as they were sampled."""
        return [success.row for success in self._experience[uid].successes]

    def state(self) -> dict[str, object]:
        """Everything, in types that JSON gives back exactly."""
        return {
            "started": self._started,
            "retired": sorted(self._retired),
            "experience": {
                uid: {"share_correct": known.share_correct, "successes": [list(one.place) for one in known.successes]}
                for uid, known in self._experience.items()
            },
        }

    def restore(self, state: Mapping[str, Any], read: ReadGroups) -> None:
        """Take the state of a checkpoint in place of the present one; `read` gives back the steps it names.

        Raises CheckpointError when such a step is lost.
        """
        self._started = state["started"]
        self._retired = set(state["retired"])
        places = [place for known in state["experience"].values() for place in known["successes"]]
        groups = {step: _required(read(step), step) for step in sorted({place[0] for place in places})}
        self._experience = {
            uid: _Experience(
                known["share_correct"],
                [
                    _Success(groups[step][group].trajectories[row], (step, group, row))
                    for step, group, row in known["successes"]
                ],
            )
            for uid, known in state["experience"].items()
        }

    def _record(self, group: Group, place: tuple[int, int]) -> None:
        if group.accuracy == 1.0 and self._config.retire_solved:
            self._retired.add(group.uid)
            self._experience.pop(group.uid, None)
            return
        known = self._experience.get(group.uid)
        successes = [
            _Success(row, (*place, index))
            for index, row in enumerate(group.trajectories)
            if row.is_correct and not row.is_off_policy
        ]
        for success in successes:
            assert not any(map(math.isnan, success.row.logp_behavior)), "an own rollout without its log-probabilities"
        if known is None and successes:
            known = self._experience[group.uid] = _Experience(group.accuracy)
        if known is not None:
            known.share_correct = group.accuracy
            known.successes = _newest_different([*known.successes, *successes])

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
    """The last ones, equal responses once: with the log-probabilities of the latest time they were drawn."""
    latest = {success.row.response_ids: success for success in successes}
    order = list(dict.fromkeys(success.row.response_ids for success in reversed(successes)))[:MAX_SUCCESSES]
    return [latest[ids] for ids in reversed(order)]


def _required(groups: Sequence[Group] | None, step: int) -> Sequence[Group]:
    if groups is None:
        raise CheckpointError(
            f"the rollout journal has lost step {step}, which the replay buffer needs; "
            "delete the checkpoints to start the stage anew"
        )
    return groups

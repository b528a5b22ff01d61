"""The policy's own successes, kept for later steps: ExGRPO (arXiv 2510.02245)."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from luffy.config.objective import ReplayConfig
from luffy.rollout.draws import uniform
from luffy.types import FinishReason, Group, Outcome, Source, Trajectory

MAX_SUCCESSES = 8
"""Kept a prompt, the newest. The paper's code has no bound; but every one costs a forward pass whenever the prompt is
replayed and stays in memory, and the older one is, the farther the policy has moved from what drew it."""


@dataclass(slots=True)
class _Experience:
    """What is known of one prompt."""

    share_correct: float
    """Of the rollouts of its last group."""
    successes: list[Trajectory] = field(default_factory=list)
    """The newest last."""


class ReplayBuffer:
    """Which prompts can be replayed, and with which of their stored successes.

    A prompt is replayable when some of the rollouts of its *last* group were right: the paper buckets by the latest
    rate, and its code by 0 < k. A prompt that has since failed altogether waits with its successes until it is solved
    again (the code leaves it in its old bucket instead). One whose rollouts were all right is retired for good where
    `config.retire_solved`. A replayed row is no rollout and does not count (in the code it does, so that a replayed
    prompt seems never to fail).

    Nothing is recorded before the first step whose share of correct rollouts is above `config.start_accuracy`; that
    step is. What the buffer holds is a pure function of the groups it has observed.
    """

    def __init__(self, config: ReplayConfig, seed: int) -> None:
        self._config = config
        self._seed = seed
        self._started = False
        self._experience: dict[str, _Experience] = {}
        self._retired: set[str] = set()

    def observe(self, groups: Sequence[Group]) -> None:
        """Record a step: all of its groups, before any filter, in order; groups without rollouts say nothing."""
        self._started = self._started or _accuracy(groups) > self._config.start_accuracy
        if not self._started:
            return
        for group in groups:
            if group.rollouts and group.uid not in self._retired:
                self._record(group)

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
        return list(self._experience[uid].successes)

    def state(self) -> dict[str, object]:
        """Everything, in types that JSON gives back exactly."""
        return {
            "started": self._started,
            "retired": sorted(self._retired),
            "experience": {
                uid: {"share_correct": known.share_correct, "successes": [_as_json(row) for row in known.successes]}
                for uid, known in self._experience.items()
            },
        }

    def restore(self, state: Mapping[str, object]) -> None:
        """Take the state of a checkpoint in place of the present one."""
        experience = state["experience"]
        retired = state["retired"]
        assert isinstance(experience, Mapping) and isinstance(retired, Sequence)
        self._started = bool(state["started"])
        self._retired = set(retired)
        self._experience = {
            uid: _Experience(known["share_correct"], [_from_json(row) for row in known["successes"]])
            for uid, known in experience.items()
        }

    def _record(self, group: Group) -> None:
        if group.accuracy == 1.0 and self._config.retire_solved:
            self._retired.add(group.uid)
            self._experience.pop(group.uid, None)
            return
        known = self._experience.get(group.uid)
        successes = [row for row in group.rollouts if row.is_correct]
        for row in successes:
            assert not any(map(math.isnan, row.logp_behavior)), "an own rollout without its log-probabilities"
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


def _newest_different(rows: Sequence[Trajectory]) -> list[Trajectory]:
    """The last rows, equal responses once: with the log-probabilities of the latest time they were drawn."""
    latest = {row.response_ids: row for row in rows}
    order = list(dict.fromkeys(row.response_ids for row in reversed(rows)))[:MAX_SUCCESSES]
    return [latest[ids] for ids in reversed(order)]


def _as_json(row: Trajectory) -> dict[str, object]:
    return {
        "prompt_ids": list(row.prompt_ids),
        "response_ids": list(row.response_ids),
        "logp_behavior": list(row.logp_behavior),
        "weight_version": list(row.weight_version),
        "reward": row.reward,
        "outcome": row.outcome.value,
        "finish_reason": row.finish_reason.value,
    }


def _from_json(row: Mapping) -> Trajectory:
    return Trajectory(
        prompt_ids=tuple(row["prompt_ids"]),
        response_ids=tuple(row["response_ids"]),
        source=(Source.ON_POLICY,) * len(row["response_ids"]),
        logp_behavior=tuple(row["logp_behavior"]),
        weight_version=tuple(row["weight_version"]),
        reward=row["reward"],
        outcome=Outcome(row["outcome"]),
        finish_reason=FinishReason(row["finish_reason"]),
    )

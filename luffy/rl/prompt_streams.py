"""Prompts in endless orders: epochs, curricula, and several of them at once for a mixture of sources."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from luffy.rl.drawn_prompts import drawn_shares, fresh_uids
from luffy.rl.quotas import quotas, step_offset
from luffy.rl.rows import RolloutTask
from luffy.types import Group


@dataclass(frozen=True, slots=True)
class Stream:
    """An endless order of prompts, and its share of every step."""

    tasks: Sequence[RolloutTask]
    indices: Callable[[int, int], list[int]]
    """Called as `indices(first, count)`: indices of `count` tasks from position `first` on."""
    weight: float = 1.0


class StreamSampler:
    """Draws prompts in the order of their stream; with several streams, a quota from each.

    The quota in a step is the stream's exact share, rounded up or down.
    """

    def __init__(self, streams: Mapping[str, Stream], seed: int) -> None:
        self._streams = streams
        self._seed = seed
        self._stream_of = {task.uid: name for name, stream in streams.items() for task in stream.tasks}
        self._taken = Counter(dict.fromkeys(streams, 0))
        self._planned: dict[int, Counter[str]] = {}
        """Prompts of each stream for each step that is planned and not yet observed."""

    def draw(self, step: int, count: int, drawn: Sequence[str] = ()) -> list[RolloutTask]:
        """The next prompts of each stream."""
        before = self._taken + self._count(drawn)
        for earlier, planned in self._planned.items():
            before += planned if earlier < step else Counter()
        weights = [stream.weight for stream in self._streams.values()]
        parts = quotas(weights, count, step_offset(self._seed, "mixture", step, len(drawn)))
        return [
            stream.tasks[index]
            for (name, stream), part in zip(self._streams.items(), parts, strict=True)
            for index in stream.indices(before[name], part)
        ]

    def plan(self, step: int, uids: Sequence[str]) -> None:
        """Record how many prompts of each stream the step takes."""
        self._planned[step] = self._count(uids)

    def observe(self, step: int, groups: Sequence[Group]) -> None:
        """Advance each stream by the prompts that the step has taken."""
        self._planned.pop(step, None)
        self._taken.update(self._count(fresh_uids(groups)))

    def metrics(self, step: int, groups: Sequence[Group]) -> dict[str, float]:
        """Each stream's share of the drawn prompts, and mean reward and length of its rollouts; empty with a single
        stream."""
        if len(self._streams) == 1:
            return {}
        metrics = drawn_shares("source", self._streams, self._count(fresh_uids(groups)))
        for name in self._streams:
            rollouts = [row for group in groups if self._stream_of[group.uid] == name for row in group.rollouts]
            if rollouts:
                metrics[f"reward/source_{name}_mean"] = fmean(row.reward for row in rollouts)
                metrics[f"rollout/source_{name}_length_mean"] = fmean(row.num_learnable for row in rollouts)
        return metrics

    def state(self) -> dict[str, object]:
        """Number of prompts taken from each stream."""
        return {"taken": dict(self._taken)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the state from a checkpoint."""
        self._taken = Counter(state["taken"])
        self._planned = {}

    def _count(self, uids: Sequence[str]) -> Counter[str]:
        return Counter(self._stream_of[uid] for uid in uids)

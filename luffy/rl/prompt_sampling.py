"""Chooses the prompts of RL steps (`rl.sampling`): streams through all of them, or pools by running pass rate.

What a step draws is a pure function of the seed and of the groups that earlier steps committed.
"""

import heapq
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import Any, Protocol

from luffy.config.draws import CurriculumSampling, PoolSampling, UniformSampling
from luffy.config.settings import RLSettings
from luffy.data.sources.mixture import mixed_in
from luffy.errors import DataError
from luffy.objectives.schedules import value_at
from luffy.rl.prompt_history import NEVER_DRAWN, PromptHistory, PromptRecord
from luffy.rl.quotas import available_quotas, quotas, step_offset
from luffy.rl.tasks import RolloutTask
from luffy.seeds import derive_seed
from luffy.training.sampler import stream_indices
from luffy.types import Group

POOLS = ("new", "hard", "normal", "easy")


class PromptSampler(Protocol):
    """Draws prompts, and keeps what later draws depend on."""

    def draw(self, step: int, count: int, drawn: Sequence[str] = ()) -> list[RolloutTask]:
        """`count` prompts for `step`, of which earlier rounds have drawn the uids `drawn`; changes nothing."""
        ...

    def plan(self, step: int, uids: Sequence[str]) -> None:
        """Record what the first round of `step` has drawn; called once per step, in order."""
        ...

    def observe(self, step: int, groups: Sequence[Group]) -> None:
        """Record all groups of a step, before filtering; called once per step, in order."""
        ...

    def metrics(self, step: int, groups: Sequence[Group]) -> dict[str, float]:
        """Where the prompts of a step came from; called before its groups are observed."""
        ...

    def state(self) -> dict[str, object]:
        """The state for a checkpoint."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the state from a checkpoint."""
        ...


@dataclass(frozen=True, slots=True)
class Stream:
    """An endless order of prompts, and its share of every step."""

    tasks: Sequence[RolloutTask]
    indices: Callable[[int, int], list[int]]
    """`count` tasks from position `first`."""
    weight: float = 1.0


class StreamSampler:
    """Prompts in the order of their stream; of several streams, a quota from each.

    The quota of a step is the exact share of its stream, rounded up or down.
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
        """Move on by the prompts that the step has taken."""
        self._planned.pop(step, None)
        self._taken.update(self._count(fresh_uids(groups)))

    def metrics(self, step: int, groups: Sequence[Group]) -> dict[str, float]:
        """Share of each stream among the drawn prompts, and what its rollouts earned; empty with a single one."""
        if len(self._streams) == 1:
            return {}
        metrics = _shares("source", self._streams, self._count(fresh_uids(groups)))
        for name in self._streams:
            rollouts = [row for group in groups if self._stream_of[group.uid] == name for row in group.rollouts]
            if rollouts:
                metrics[f"reward/source_{name}_mean"] = fmean(row.reward for row in rollouts)
                metrics[f"rollout/source_{name}_length_mean"] = fmean(row.num_learnable for row in rollouts)
        return metrics

    def state(self) -> dict[str, object]:
        """Prompts taken of each stream."""
        return {"taken": dict(self._taken)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore them from a checkpoint."""
        self._taken = Counter(state["taken"])
        self._planned = {}

    def _count(self, uids: Sequence[str]) -> Counter[str]:
        return Counter(self._stream_of[uid] for uid in uids)


class PoolSampler:
    """Prompts by quotas of pools, from each pool those that were drawn longest ago (`PoolSampling`)."""

    def __init__(
        self, tasks: Sequence[RolloutTask], config: PoolSampling, seed: int, total_steps: int, ahead: int
    ) -> None:
        self._tasks = tasks
        self._config = config
        self._seed = seed
        self._total_steps = total_steps
        self._ahead = ahead
        self._history = PromptHistory(config.memory, ahead)

    def draw(self, step: int, count: int, drawn: Sequence[str] = ()) -> list[RolloutTask]:
        """Quotas of all pools; a prompt comes twice, or while an earlier step has it, only where no other is left."""
        known = self._history.as_known_to(step)
        on_their_way = {uid for uid, record in known.items() if record.last_step >= step - self._ahead}
        chosen: list[RolloutTask] = []
        while len(chosen) < count:
            taken = {*drawn, *(task.uid for task in chosen)}
            left = self._without(taken | on_their_way) or self._without(taken) or self._tasks
            chosen += self._from_pools(left, known, step, count - len(chosen), len(drawn) + len(chosen))
        return chosen

    def plan(self, step: int, uids: Sequence[str]) -> None:
        """Record the prompts that the step has drawn."""
        self._history.plan(step, uids)

    def observe(self, step: int, groups: Sequence[Group]) -> None:
        """Record the pass rates of a step."""
        self._history.observe(step, groups)

    def metrics(self, step: int, groups: Sequence[Group]) -> dict[str, float]:
        """Share of each pool among the drawn prompts, and its share of all prompts."""
        known, pool_of = self._history.as_known_to(step), self._pools(step)
        drawn = Counter(pool_of(known.get(uid, NEVER_DRAWN)) for uid in fresh_uids(groups))
        all_prompts = Counter(pool_of(known.get(task.uid, NEVER_DRAWN)) for task in self._tasks)
        sizes = {f"batch/pool_{name}_size": float(all_prompts[name]) for name in POOLS}
        return _shares("pool", POOLS, drawn) | sizes

    def state(self) -> dict[str, object]:
        """What is known of every prompt."""
        return self._history.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore it from a checkpoint."""
        self._history.restore(state)

    def _without(self, uids: set[str]) -> list[RolloutTask]:
        return [task for task in self._tasks if task.uid not in uids]

    def _from_pools(
        self, tasks: Sequence[RolloutTask], known: Mapping[str, PromptRecord], step: int, count: int, num_drawn: int
    ) -> list[RolloutTask]:
        pools: dict[str, list[RolloutTask]] = {name: [] for name in POOLS}
        pool_of = self._pools(step)
        for task in tasks:
            pools[pool_of(known.get(task.uid, NEVER_DRAWN))].append(task)
        sizes = {name: len(pool) for name, pool in pools.items()}
        offset = step_offset(self._seed, "pools", step, num_drawn)
        parts = available_quotas(self._config.shares.model_dump(), sizes, count, offset)

        def age(task: RolloutTask) -> tuple[int, int]:
            return known.get(task.uid, NEVER_DRAWN).last_step, derive_seed(self._seed, "pool", step, task.uid)

        return [task for name, part in parts.items() for task in heapq.nsmallest(part, pools[name], key=age)]

    def _pools(self, step: int) -> Callable[[PromptRecord], str]:
        """The pool of a prompt at `step`."""
        hard, easy = (
            value_at(bound, step, self._total_steps) for bound in (self._config.hard_at_most, self._config.easy_above)
        )

        def pool_of(record: PromptRecord) -> str:
            if record.last_step == 0:
                return "new"
            if record.pass_rate is None:  # on its way, or a step without a rollout of the bare prompt
                return "normal"
            return "hard" if record.pass_rate <= hard else "easy" if record.pass_rate > easy else "normal"

        return pool_of


def open_sampler(settings: RLSettings, tasks: Sequence[RolloutTask]) -> PromptSampler:
    """The sampler of `rl.sampling`; DataError where nothing that a curriculum sorts by is known."""
    config, seed = settings.rl.sampling, settings.seed
    if isinstance(config, PoolSampling):
        return PoolSampler(tasks, config, seed, settings.rl.steps, settings.rl.max_staleness)
    streams = {name: Stream(part, _order(part, config, seed), weight) for name, (part, weight) in _parts(tasks).items()}
    return StreamSampler(streams, seed)


def _parts(tasks: Sequence[RolloutTask]) -> dict[str, tuple[list[RolloutTask], float]]:
    """The tasks of each part of a mixture and its weight; all tasks where the data are none."""
    marks = [mixed_in(task.problem.extra_info) for task in tasks]
    if None in marks:
        return {"train": ([*tasks], 1.0)}
    parts: dict[str, list[RolloutTask]] = {}
    weights: dict[str, float] = {}
    for task, mark in zip(tasks, marks, strict=True):
        assert mark is not None
        parts.setdefault(mark.part, []).append(task)
        weights |= mark.weights
    for name in weights:
        if name not in parts:
            raise DataError(
                f"data.train.parts.{name}: none of its prompts are left for RL, so no step could take its share; see "
                "card.md for why rows were rejected, or remove the part"
            )
    return {name: (parts[name], weight) for name, weight in weights.items()}


def _order(
    tasks: Sequence[RolloutTask], config: UniformSampling | CurriculumSampling, seed: int
) -> Callable[[int, int], list[int]]:
    if isinstance(config, CurriculumSampling):
        return partial(_repeated, _sorted(tasks, config, seed))
    return partial(stream_indices, len(tasks), seed=seed)


def fresh_uids(groups: Sequence[Group]) -> list[str]:
    """The prompts of a step that were drawn, and not replayed."""
    return [group.uid for group in groups if not group.is_replayed]


def _sorted(tasks: Sequence[RolloutTask], config: CurriculumSampling, seed: int) -> list[int]:
    """Indices of the tasks in the order of a curriculum; those without a measure last."""
    measures = [_difficulty(task, config) for task in tasks]
    if all(measure is None for measure in measures):
        lacking = "a trace" if config.by == "trace_length" else "a measured pass rate"
        raise DataError(f"rl.sampling.by: {config.by}: no training prompt has {lacking}; choose another order")
    sign = 1 if config.direction == "easy_first" else -1

    def place(index: int) -> tuple[bool, float, int]:
        measure = measures[index]
        return measure is None, sign * (measure or 0.0), derive_seed(seed, "curriculum", tasks[index].uid)

    return sorted(range(len(tasks)), key=place)


def _difficulty(task: RolloutTask, config: CurriculumSampling) -> float | None:
    """The larger, the harder; None: not known."""
    if config.by == "trace_length":
        return min((float(len(trace.token_ids)) for trace in task.demonstrations), default=None)
    return None if task.pass_rate is None else -task.pass_rate


def _repeated(order: Sequence[int], first: int, count: int) -> list[int]:
    return [order[place % len(order)] for place in range(first, first + count)]


def _shares(kind: str, names: Sequence[str] | Mapping[str, object], counts: Counter[str]) -> dict[str, float]:
    total = max(counts.total(), 1)
    return {f"batch/{kind}_{name}_share": counts[name] / total for name in names}

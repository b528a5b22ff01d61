"""Chooses the prompts of RL steps (`rl.sampling`): streams through all of them, or pools by running pass rate.

What a step draws is a pure function of the seed and of the groups that earlier steps committed. Streams are endless
orders of prompts: epochs, curricula, and several of them at once for a mixture of sources.
"""

import heapq
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from statistics import fmean
from typing import Any, NamedTuple

from luffy.config.settings import RLSettings
from luffy.config.training import CurriculumSampling, PoolSampling
from luffy.data.sources import mixed_in
from luffy.errors import DataError
from luffy.objectives.schedules import value_at
from luffy.rl.fold import Event, Fold
from luffy.rl.rows import RolloutTask
from luffy.seeds import derive_seed, uniform
from luffy.training.batching import stream_indices
from luffy.types import Group


def open_sampler(settings: RLSettings, tasks: Sequence[RolloutTask]) -> "PromptSampler":
    """The sampler of `rl.sampling`; raises DataError where no prompt has the measure that a curriculum sorts by."""
    config, seed = settings.rl.sampling, settings.seed
    if isinstance(config, PoolSampling):
        return PoolSampler(tasks, config, seed, settings.rl.steps, settings.rl.max_staleness)
    streams = {}
    for name, (part, weight) in _parts(tasks).items():
        if isinstance(config, CurriculumSampling):
            indices: Callable[[int, int], list[int]] = partial(_taken_in_turn, _sorted(part, config, seed))
        else:
            indices = partial(stream_indices, len(part), seed=seed)
        streams[name] = Stream(part, indices, weight)
    return StreamSampler(streams, seed)


def _parts(tasks: Sequence[RolloutTask]) -> dict[str, tuple[list[RolloutTask], float]]:
    """Tasks and weight of each part of a mixture; a single part `train` where the data are not a mixture."""
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


def _sorted(tasks: Sequence[RolloutTask], config: CurriculumSampling, seed: int) -> list[int]:
    """Indices of the tasks in the order of a curriculum; those without a measure last."""
    # They grow with the difficulty.
    if config.by == "trace_length":
        lengths = [[float(len(trace.token_ids)) for trace in task.demonstrations] for task in tasks]
        measures = [min(of_task, default=None) for of_task in lengths]
    else:
        measures = [None if task.pass_rate is None else -task.pass_rate for task in tasks]
    if all(measure is None for measure in measures):
        lacking = "a trace" if config.by == "trace_length" else "a measured pass rate"
        raise DataError(f"rl.sampling.by: {config.by}: no training prompt has {lacking}; choose another order")
    sign = 1 if config.direction == "easy_first" else -1

    def place(index: int) -> tuple[bool, float, int]:
        measure = measures[index]
        return measure is None, sign * (measure or 0.0), derive_seed(seed, "curriculum", tasks[index].uid)

    return sorted(range(len(tasks)), key=place)


def _taken_in_turn(order: Sequence[int], first: int, count: int) -> list[int]:
    return [order[place % len(order)] for place in range(first, first + count)]


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
        """`count` prompts for `step`, of which earlier rounds have drawn the uids `drawn`; changes nothing."""
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
        """Record what the first round of `step` has drawn; called once per step, in order."""
        self._planned[step] = self._count(uids)

    def observe(self, step: int, groups: Sequence[Group]) -> None:
        """Record all groups of a step, before filtering, open ones too; called once per step, in order."""
        self._planned.pop(step, None)
        self._taken.update(self._count(fresh_uids(groups)))

    def metrics(self, step: int, groups: Sequence[Group]) -> dict[str, float]:
        """Each stream's share of the drawn prompts, and mean reward and length of its rollouts; empty with a single
        stream."""
        if len(self._streams) == 1:
            return {}
        metrics = drawn_shares("source", self._streams, self._count(fresh_uids(groups)))
        for name in self._streams:
            closed = [group for group in groups if self._stream_of[group.uid] == name and not group.is_open]
            rollouts = [row for group in closed for row in group.rollouts]
            if rollouts:
                metrics[f"reward/source_{name}_mean"] = fmean(row.reward for row in rollouts)
                metrics[f"rollout/source_{name}_length_mean"] = fmean(row.num_learnable for row in rollouts)
        return metrics

    def state(self) -> dict[str, object]:
        return {"taken": dict(self._taken)}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._taken = Counter(state["taken"])
        self._planned = {}

    def _count(self, uids: Sequence[str]) -> Counter[str]:
        return Counter(self._stream_of[uid] for uid in uids)


class PromptRecord(NamedTuple):
    """The history of one prompt."""

    pass_rate: float | None = None
    """None until its rollouts were graded."""
    last_step: int = 0
    """The step that drew it last; 0: none has."""


NEVER_DRAWN = PromptRecord()


class PromptHistory:
    """Running pass rates and draws of all prompts, limited to what each step may know when it is planned.

    With `ahead` (`rl.max_staleness`) k, step s is planned after training on step s - 1 - k, so it sees pass rates only
    up to that step. A resumed run may know later ones, but ignores them and so draws the same prompts. The draws of the
    steps in between are known from their plans. A pure function of the observed groups and of the plans.
    """

    def __init__(self, memory: float, ahead: int) -> None:
        self._memory = memory
        self._fold = Fold(self._enter, ahead, lambda record: PromptRecord(*record))
        """Events of each group: uid, accuracy of the rollouts, and whether it was drawn."""
        self._planned: dict[int, tuple[str, ...]] = {}
        """Prompts drawn by planned steps that are not observed yet."""

    def plan(self, step: int, uids: Sequence[str]) -> None:
        self._planned[step] = tuple(uids)

    def observe(self, step: int, groups: Sequence[Group]) -> None:
        """Record all groups of a step, before filtering; replayed and carried ones count for the pass rate only, and
        open ones as drawn."""
        self._planned.pop(step, None)
        known = [(group, bool(group.rollouts) and not group.is_open) for group in groups]
        self._fold.add(
            step, [(group.uid, group.accuracy if is_known else None, _is_drawn(group)) for group, is_known in known]
        )

    def as_known_to(self, step: int) -> Mapping[str, PromptRecord]:
        """The records visible to the plan of `step`; prompts without one have never been drawn."""
        known = self._fold.known_to(step)
        drawn = {earlier: [uid for uid, _, is_drawn in seen if is_drawn] for earlier, seen in self._fold.recent.items()}
        for earlier, uids in sorted((drawn | self._planned).items()):
            for uid in uids if earlier < step else ():
                rate, last = known.get(uid, NEVER_DRAWN)
                known[uid] = PromptRecord(rate, max(last, earlier))
        return known

    def state(self) -> dict[str, object]:
        return self._fold.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        self._fold.restore(state)
        self._planned = {}

    def _enter(self, known: dict[str, PromptRecord], step: int, events: Sequence[Event]) -> None:
        for uid, accuracy, is_drawn in events:
            before = known.get(uid, NEVER_DRAWN)
            rate = before.pass_rate
            if accuracy is not None:
                rate = accuracy if rate is None else self._memory * rate + (1 - self._memory) * accuracy
            known[uid] = PromptRecord(rate, step if is_drawn else before.last_step)


POOLS = ("new", "hard", "normal", "easy")


class PoolSampler:
    """Draws a quota of prompts from each pool, least recently drawn first (`PoolSampling`)."""

    def __init__(
        self, tasks: Sequence[RolloutTask], config: PoolSampling, seed: int, total_steps: int, ahead: int
    ) -> None:
        self._tasks = tasks
        self._config = config
        self._seed = seed
        self._total_steps = total_steps
        self._ahead = ahead
        self._history = PromptHistory(config.memory, ahead)
        # All that later draws depend on.
        self.plan, self.observe = self._history.plan, self._history.observe
        self.state, self.restore = self._history.state, self._history.restore

    def draw(self, step: int, count: int, drawn: Sequence[str] = ()) -> list[RolloutTask]:
        """`count` prompts by the quotas of the pools; one that this step, or a step still in flight, has already drawn
        is taken only where no other is left."""
        known = self._history.as_known_to(step)
        on_their_way = {uid for uid, record in known.items() if record.last_step >= step - self._ahead}
        pool_of = self._pools(step)

        def age(task: RolloutTask) -> tuple[int, int]:
            return known.get(task.uid, NEVER_DRAWN).last_step, derive_seed(self._seed, "pool", step, task.uid)

        chosen: list[RolloutTask] = []
        while len(chosen) < count:
            taken = {*drawn, *(task.uid for task in chosen)}
            others = [task for task in self._tasks if task.uid not in taken]
            left = [task for task in others if task.uid not in on_their_way] or others or self._tasks
            pools: dict[str, list[RolloutTask]] = {name: [] for name in POOLS}
            for task in left:
                pools[pool_of(known.get(task.uid, NEVER_DRAWN))].append(task)
            sizes = {name: len(pool) for name, pool in pools.items()}
            offset = step_offset(self._seed, "pools", step, len(drawn) + len(chosen))
            parts = available_quotas(self._config.shares.model_dump(), sizes, count - len(chosen), offset)
            chosen += [task for name, part in parts.items() for task in heapq.nsmallest(part, pools[name], key=age)]
        return chosen

    def metrics(self, step: int, groups: Sequence[Group]) -> dict[str, float]:
        """Share of each pool among the drawn prompts, and number of prompts in the pool."""
        known, pool_of = self._history.as_known_to(step), self._pools(step)
        drawn = Counter(pool_of(known.get(uid, NEVER_DRAWN)) for uid in fresh_uids(groups))
        all_prompts = Counter(pool_of(known.get(task.uid, NEVER_DRAWN)) for task in self._tasks)
        sizes = {f"batch/pool_{name}_size": float(all_prompts[name]) for name in POOLS}
        return drawn_shares("pool", POOLS, drawn) | sizes

    def _pools(self, step: int) -> Callable[[PromptRecord], str]:
        hard, easy = (
            value_at(bound, step, self._total_steps) for bound in (self._config.hard_at_most, self._config.easy_above)
        )

        def pool_of(record: PromptRecord) -> str:
            if record.last_step == 0:
                return "new"
            if record.pass_rate is None:  # drawn and not observed yet, or observed without a rollout of the bare prompt
                return "normal"
            return "hard" if record.pass_rate <= hard else "easy" if record.pass_rate > easy else "normal"

        return pool_of


PromptSampler = StreamSampler | PoolSampler
"""Draws prompts, and keeps what later draws depend on; its `metrics` of a step are read before the step's groups are
observed."""
_GOLDEN = (math.sqrt(5) - 1) / 2
"""Its multiples, modulo 1, fill the interval evenly."""


def quotas(weights: Sequence[float], count: int, offset: float) -> list[int]:
    """Split `count` in proportion to `weights`; each part is its exact share, rounded up or down.

    Systematic sampling (Madow 1949): part k counts the whole numbers between two partial sums of the shares, shifted by
    `offset` in [0, 1). Over evenly spread offsets every part has its exact share on average.
    """
    total = sum(weights)
    # Rounded, so that sums which are whole numbers in exact arithmetic are so here.
    ends = [0.0, *(round(end * count / total, 9) for end in accumulate(weights))]
    return [math.floor(end + offset) - math.floor(start + offset) for start, end in pairwise(ends)]


def step_offset(seed: int, purpose: str, step: int, num_drawn: int = 0) -> float:
    """The offset of a step's quotas: starts at random and moves by the golden ratio from step to step.

    `num_drawn` distinguishes the rounds of dynamic sampling.
    """
    return (uniform(seed, purpose, num_drawn) + step * _GOLDEN) % 1.0


def available_quotas(
    shares: Mapping[str, float], sizes: Mapping[str, int], count: int, offset: float
) -> dict[str, int]:
    """Split `count` in proportion to `shares`, no part above its size; the others make up for a part that is too small.

    Parts with share 0 are used only once all others are exhausted. The sum is below `count` where all sizes together
    are.
    """
    given = dict.fromkeys(shares, 0)
    while (left := min(count, sum(sizes.values())) - sum(given.values())) > 0:
        rest = {name: share for name, share in shares.items() if given[name] < sizes[name]}
        wanted = {name: share for name, share in rest.items() if share > 0} or dict.fromkeys(rest, 1.0)
        for name, extra in zip(wanted, quotas([*wanted.values()], left, offset), strict=True):
            given[name] = min(sizes[name], given[name] + extra)
    return given


def fresh_uids(groups: Sequence[Group]) -> list[str]:
    """Uids of a step's prompts that the sampler drew; those of replayed rows and of carried groups are left out."""
    return [group.uid for group in groups if _is_drawn(group)]


def _is_drawn(group: Group) -> bool:
    return not group.is_replayed and not group.is_carried


def drawn_shares(kind: str, names: Iterable[str], counts: Counter[str]) -> dict[str, float]:
    """Metrics: the share of each of `names` among the drawn prompts."""
    total = max(counts.total(), 1)
    return {f"batch/{kind}_{name}_share": counts[name] / total for name in names}

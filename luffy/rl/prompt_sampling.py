"""Chooses the prompts of RL steps (`rl.sampling`): streams through all of them, or pools by running pass rate.

What a step draws is a pure function of the seed and of the groups that earlier steps committed.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from luffy.config.draws import CurriculumSampling, PoolSampling, UniformSampling
from luffy.config.settings import RLSettings
from luffy.data.sources.mixture import mixed_in
from luffy.errors import DataError
from luffy.rl.prompt_pools import PoolSampler
from luffy.rl.prompt_streams import Stream, StreamSampler
from luffy.rl.rows import RolloutTask
from luffy.seeds import derive_seed
from luffy.training.batching import stream_indices
from luffy.types import Group


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


def open_sampler(settings: RLSettings, tasks: Sequence[RolloutTask]) -> PromptSampler:
    """The sampler of `rl.sampling`; raises DataError where no prompt has the measure that a curriculum sorts by."""
    config, seed = settings.rl.sampling, settings.seed
    if isinstance(config, PoolSampling):
        return PoolSampler(tasks, config, seed, settings.rl.steps, settings.rl.max_staleness)
    streams = {name: Stream(part, _order(part, config, seed), weight) for name, (part, weight) in _parts(tasks).items()}
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


def _order(
    tasks: Sequence[RolloutTask], config: UniformSampling | CurriculumSampling, seed: int
) -> Callable[[int, int], list[int]]:
    if isinstance(config, CurriculumSampling):
        return partial(_repeated, _sorted(tasks, config, seed))
    return partial(stream_indices, len(tasks), seed=seed)


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
    """Measure that grows with the difficulty of the task; None: not known."""
    if config.by == "trace_length":
        return min((float(len(trace.token_ids)) for trace in task.demonstrations), default=None)
    return None if task.pass_rate is None else -task.pass_rate


def _repeated(order: Sequence[int], first: int, count: int) -> list[int]:
    return [order[place % len(order)] for place in range(first, first + count)]

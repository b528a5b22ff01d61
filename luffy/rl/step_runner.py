"""Runs the RL steps of a stage: generate groups, filter them, train, update the replay state."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol

from luffy.cluster.protocol import Cluster
from luffy.config.settings import RLSettings
from luffy.rl.experience import Experience, Sources
from luffy.rl.generation import Generation
from luffy.rl.groups import GroupCollector
from luffy.rl.rows import RolloutTask
from luffy.tracking.journal import RolloutJournal
from luffy.tracking.rollout_metrics import (
    anchor_metrics,
    hint_metrics,
    learned_metrics,
    rollout_metrics,
    staleness_metrics,
)
from luffy.types import Group


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """The groups of a finished step and its metrics."""

    groups: Sequence[Group]
    """The groups it trained on, or all groups if every one was filtered out."""
    metrics: dict[str, float]


class RowTeacher(Protocol):
    """Adds to the rows of a step the inputs of `rl.teacher` that the training ranks cannot compute themselves."""

    def taught(self, groups: Sequence[Group]) -> Sequence[Group]:
        """The same groups; nothing but the rows' teacher fields differs."""
        ...


class StepRunner:
    """Runs RL steps with a cluster's engine and trainer.

    A context manager: running generation is abandoned when the context ends.
    """

    def __init__(
        self,
        settings: RLSettings,
        cluster: Cluster,
        tasks: Sequence[RolloutTask],
        collector: GroupCollector,
        journal: RolloutJournal,
        teaching: RowTeacher | None = None,
    ) -> None:
        self._settings = settings
        self._trainer = cluster.trainer
        self._teaching = teaching
        self._experience = Experience(settings, Sources(tasks, collector, journal, cluster.trainer))
        self._generation = Generation(self._experience, cluster, settings.rl.max_staleness, settings.rl.steps)

    def run(self, step: int) -> StepOutcome:
        """Run RL step `step` (from 1), after all earlier ones; its groups are journalled before training on them."""
        began, passes = time.perf_counter(), self._settings.rl.passes
        groups, metrics = self._generation.take(step)
        kept = self._experience.kept(step, groups)
        metrics |= self._group_metrics(step, groups, kept) | self._experience.metrics(step, groups)
        taught, teacher_s = self._as_taught(kept)
        metrics |= self._trainer.learn(taught, step)
        if "perf/teacher_s" in metrics:
            metrics["perf/teacher_s"] += teacher_s
        self._experience.observe(step, groups)
        demonstrations = self._experience.hard_demonstrations(step) or ()
        if demonstrations:
            metrics |= self._trainer.sft_step(demonstrations, step)
            metrics["batch/optimizer_steps"] += 1
        self._trainer.finish_step(step)
        metrics |= learned_metrics(kept, demonstrations, passes)
        speed = _speed(groups, kept, metrics, time.perf_counter() - began, passes)
        return StepOutcome(kept or groups, metrics | speed)

    def save(self, step: int, *, is_extra: bool = False) -> None:
        """Write the checkpoint of a finished step; `is_extra`: it is not on the schedule."""
        self._trainer.save(step, self._experience.state(), is_extra=is_extra)

    def restore(self, step: int) -> None:
        """Restore the checkpoint of `step`; the next step to run is `step` + 1."""
        self._experience.restore(self._trainer.restore(step))

    def __enter__(self) -> "StepRunner":
        self._generation.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._generation.__exit__(kind, error, trace)

    def _as_taught(self, groups: Sequence[Group]) -> tuple[Sequence[Group], float]:
        """The groups with the inputs of the teacher, and the seconds that these took."""
        if self._teaching is None:
            return groups, 0.0
        began = time.perf_counter()
        return self._teaching.taught(groups), time.perf_counter() - began

    def _group_metrics(self, step: int, groups: Sequence[Group], kept: Sequence[Group]) -> dict[str, float]:
        objective, rl = self._settings.objective, self._settings.rl
        return (
            rollout_metrics(groups, replays=objective.replay is not None)
            | {"batch/kept_share": len(kept) / len(groups)}
            | staleness_metrics(groups, step, rl.max_staleness)
            | ({} if objective.group.hint is None else hint_metrics(groups))
            | ({} if objective.group.anchor is None else anchor_metrics(groups))
        )


def _speed(
    groups: Sequence[Group], kept: Sequence[Group], metrics: Mapping[str, float], seconds: float, passes: int
) -> dict[str, float]:
    """Throughput of the step and of its training part, which counts the groups trained on, once for each pass; and the
    share of time that the trainer waited."""
    idle_s = metrics["perf/trainer_idle_s"]
    return {
        "perf/step_s": seconds,
        "perf/tokens_per_s": _num_tokens(groups) / seconds,
        "perf/trainer_idle_share": idle_s / seconds,
        "perf/train_tokens_per_s": passes * _num_tokens(kept) / (seconds - idle_s),
    }


def _num_tokens(groups: Sequence[Group]) -> int:
    return sum(row.num_tokens for group in groups for row in group.trajectories)

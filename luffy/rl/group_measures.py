"""Measures of whole groups, taken once their episodes are graded."""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace

from luffy.environments.episode_loop import run_in_loop
from luffy.environments.live_episode import FailedEpisode, called
from luffy.environments.rubric import EpisodeScorer, GroupView
from luffy.grading import Grade
from luffy.rl.rows import Row
from luffy.rl.tasks import RolloutTask
from luffy.types import FinishReason, Outcome

logger = logging.getLogger(__name__)
GradedRows = Sequence[tuple[Row, Grade]]


def with_group_measures(
    scorer: EpisodeScorer, tasks: Sequence[RolloutTask], groups: Sequence[GradedRows]
) -> list[GradedRows]:
    """The rows of each group, with the measures of the group added.

    Rows whose environment failed are not measured. Where a measure fails, all rows of the group are graded `crashed`.
    """
    return run_in_loop(_all(scorer, tasks, groups))


async def _all(scorer: EpisodeScorer, tasks: Sequence[RolloutTask], groups: Sequence[GradedRows]) -> list[GradedRows]:
    pairs = zip(tasks, groups, strict=True)
    return list(await asyncio.gather(*(_measured(scorer, task, rows) for task, rows in pairs)))


async def _measured(scorer: EpisodeScorer, task: RolloutTask, rows: GradedRows) -> GradedRows:
    played = [(row, grade) for row, grade in rows if not row.has_failed]
    if not played:
        return rows
    try:
        measures = iter(await called(scorer.measure_group(_view(task, played))))
    except FailedEpisode as failure:
        logger.warning("%s: a measure of a group failed", task.problem.data_source, exc_info=failure.__cause__)
        return [_crashed(row, f"{type(failure.__cause__).__name__}: {failure.__cause__}") for row, _ in rows]
    return [
        (row if row.has_failed else replace(row, measures={**row.measures, **next(measures)}), grade)
        for row, grade in rows
    ]


def _view(task: RolloutTask, played: GradedRows) -> GroupView:
    return GroupView(
        prompt=task.messages,
        completions=[row.completion for row, _ in played],
        answer=task.ground_truth,
        info=task.problem.extra_info,
        task=task.problem.data_source,
        counts=[row.measures for row, _ in played],
        rewards=[grade.reward for _, grade in played],
        correct=[grade.outcome is Outcome.CORRECT for _, grade in played],
    )


def _crashed(row: Row, reason: str) -> tuple[Row, Grade]:
    failed = replace(row, finish_reason=FinishReason.ENVIRONMENT_ERROR)
    return failed, Grade(Outcome.CRASHED, None, f"a measure of the group failed: {reason:.200}")

"""Samples and grades planned rows, each in a single turn or as an episode."""

from collections.abc import Callable, Sequence

from luffy.environments.episodes import EpisodePlayer
from luffy.environments.live_episode import EpisodeStart
from luffy.grading import Grade, Grader, GradeRequest, require_verdicts
from luffy.rl.busy_time import BusyTime
from luffy.rl.group_measures import GradedRows, with_group_measures
from luffy.rl.rows import Row
from luffy.rl.tasks import RolloutTask
from luffy.rollout.engine import Completion, RolloutEngine, SamplingParams
from luffy.rollout.stop_texts import StopTexts
from luffy.types import Trajectory


class RowSampler:
    """Has the policy continue rows, and grades them.

    A whole trace has nothing to sample and is graded as it is; a prefix and its continuation are graded as one text.

    With `stops` a response ends with the token that completes a stop text; `decode` returns its text up to there.
    With a `player` a response is an episode: an environment answers the policy's turns, and the last turn is graded.
    """

    def __init__(
        self,
        grader: Grader,
        decode: Callable[[Sequence[int]], str],
        params: SamplingParams,
        player: EpisodePlayer | None,
        stops: StopTexts | None,
    ) -> None:
        assert player is None or stops is None, "the turns of an episode end with the stop token"
        self._grader = grader
        self._decode = decode
        self._params = params
        self._player = player
        self._stops = stops
        self._grading = BusyTime()

    def sample(
        self, engine: RolloutEngine, tasks: Sequence[RolloutTask], plans: Sequence[Sequence[Row]]
    ) -> list[list[Trajectory]]:
        """The graded rows of each task's plan, in order; all are sampled in one call of the engine.

        Raises LostError if a judge could not be reached.
        """
        return self._graded(tasks, self._generated(engine, tasks, plans))

    def grading_s(self) -> float:
        """Seconds spent on grading since the last call."""
        return self._grading.since_last()[1]

    def _generated(
        self, engine: RolloutEngine, tasks: Sequence[RolloutTask], plans: Sequence[Sequence[Row]]
    ) -> list[list[Row]]:
        """The planned rows with what the policy sampled."""
        planned = [(task, row) for task, plan in zip(tasks, plans, strict=True) for row in plan if self.is_played(row)]
        finished = iter(self._continued(engine, planned))
        return [[next(finished) if self.is_played(row) else row for row in plan] for plan in plans]

    def is_played(self, row: Row) -> bool:
        """Whether the row has to be sampled or, for a whole trace, played again to measure it."""
        return not row.is_whole_trace or (self._player is not None and self._player.scorer.needs_demonstrations)

    def _continued(self, engine: RolloutEngine, planned: Sequence[tuple[RolloutTask, Row]]) -> list[Row]:
        """Each row, continued by the policy: in a single call of the engine, or turn by turn with an environment."""
        if self._player is None:
            completions = engine.generate([row.request() for _, row in planned], self._params)
            rows = [row for _, row in planned]
            return [row.continued(self._cut(row, found)) for row, found in zip(rows, completions, strict=True)]
        episodes = self._player.play([_start(task, row) for task, row in planned], engine, self._params)
        return [row.played(episode) for (_, row), episode in zip(planned, episodes, strict=True)]

    def _cut(self, row: Row, completion: Completion) -> Completion:
        return completion if self._stops is None else self._stops.cut(completion, row.given_ids)

    def _graded(self, tasks: Sequence[RolloutTask], rows: Sequence[Sequence[Row]]) -> list[list[Trajectory]]:
        requests = [self._request(task, row) for task, found in zip(tasks, rows, strict=True) for row in found]
        with self._grading.measured():
            grades = self._grader.grade(requests)
        # A reward of 0 for every answer would train the policy on the judge's absence.
        require_verdicts(grades, "responses", "the same command resumes after the last checkpoint")
        each = iter(grades)
        graded: list[GradedRows] = [[(row, next(each)) for row in found] for found in rows]
        if self._player is not None and self._player.scorer.measures_groups:
            graded = with_group_measures(self._player.scorer, tasks, graded)
        return [[self._trajectory(row, grade) for row, grade in found] for found in graded]

    def _request(self, task: RolloutTask, row: Row) -> GradeRequest:
        reply = row.reply(self._decode)
        return GradeRequest(reply, task.ground_truth, task.problem, measures=row.measures, has_failed=row.has_failed)

    def _trajectory(self, row: Row, grade: Grade) -> Trajectory:
        if self._player is None or row.has_failed:
            return row.trajectory(grade)
        return row.trajectory(grade, self._player.scorer.reward(grade.reward, row.measures))


def _start(task: RolloutTask, row: Row) -> EpisodeStart:
    return EpisodeStart(
        task.problem,
        task.ground_truth,
        task.messages,
        row.prompt_ids,
        row.seed,
        row.given_ids,
        row.given_source,
        is_whole=row.is_whole_trace,
    )

"""Rows of groups, from a prompt and a plan to graded trajectories.

A row begins with none of a trace's tokens (a rollout), some (a prefix-conditioned row, which the policy continues) or
all (a demonstration). `RowSampler` has the policy continue planned rows, each in a single turn or as an episode, and
grades them.
"""

import itertools
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from luffy.config.training import OverlongConfig
from luffy.environments.episodes import Episode, EpisodePlayer, Segment, context_starts
from luffy.environments.live_episode import EpisodeStart
from luffy.errors import ConfigError
from luffy.grading.request import TOKENS, Grade, Grader, GradeRequest, Problem, require_verdicts
from luffy.rollout.engine import Completion, RolloutEngine, RolloutRequest, SamplingParams, StopTexts
from luffy.types import WITHOUT_REWARD, FinishReason, Group, Message, Outcome, Source, Start, Trajectory


@dataclass(frozen=True, slots=True)
class Demonstration:
    """A tokenized trace that ends with the stop token."""

    reply: str
    """Text of its last turn, which is graded."""
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...] | None
    """Log-probabilities under the model that wrote it, if known."""
    source: tuple[Source, ...] = ()
    """Per token of a trace of many turns: its author or the environment. Empty where the author wrote all of it."""
    context_starts: tuple[int, ...] = ()
    """As in `Trajectory.context_starts`; no row takes only a prefix of such a trace."""


@dataclass(frozen=True, slots=True)
class RolloutTask:
    """A tokenized prompt with its reference answer and traces."""

    uid: str
    prompt_ids: tuple[int, ...]
    ground_truth: str
    demonstrations: tuple[Demonstration, ...]
    replayed: Trajectory | None = None
    """A stored success of the policy, which takes the place of one rollout."""
    begun: Group | None = None
    """Its open group, whose interrupted rows are continued (`rl.partial_rollout_tokens`); None: the group is new."""
    problem: Problem = field(default_factory=Problem)
    """Input of grading besides the reference answer."""
    pass_rate: float | None = None
    """Pass rate measured by the stage `difficulty`; None: not measured."""
    messages: tuple[Message, ...] = ()
    """Messages of the prompt, for an environment; may be empty without one."""
    without: frozenset[str] = frozenset()
    """Starts that it does not have in this step, since earlier ones solved it (`when.pass_rate_at_most`)."""
    known: Mapping[str, Mapping[str, Any]] = field(default_factory=dict, hash=False)
    """By start: what earlier steps have taught its dose (`luffy.rl.doses.Memory`)."""


@dataclass(frozen=True, slots=True)
class Visit:
    """One occurrence of a task in a step."""

    task: RolloutTask
    step: int
    """The RL step, from 1."""
    repeat: int
    """Number of earlier occurrences of the prompt in this step."""


DEMONSTRATION_VERSION = -1
"""Weight version of tokens that were not sampled in this run."""


@dataclass(frozen=True, slots=True)
class ShownPrompt:
    """A prompt that shows more than the bare one."""

    prompt_ids: tuple[int, ...]
    text: str
    """The hint or the feedback."""
    is_learned_from: bool
    """Whether rows are learned under this prompt; otherwise under the bare one."""


@dataclass(frozen=True, slots=True)
class Row:
    """What a row begins with, and what the policy sampled after it, perhaps in several turns."""

    prompt_ids: tuple[int, ...]
    seed: int = 0
    trace: Demonstration | None = None
    num_given: int = 0
    """Number of tokens of `trace` that the row begins with."""
    segments: tuple[Segment, ...] = ()
    """Turns of the policy, and what the environment wrote between them. Empty before generation, and for a whole
    trace."""
    finish_reason: FinishReason = FinishReason.STOP
    measures: Mapping[str, float] = field(default_factory=dict, hash=False)
    shown: ShownPrompt | None = None
    """The prompt to sample under in place of `prompt_ids`; None: the bare one."""
    start: Start | None = None
    begun: Trajectory | None = None
    """The row as an earlier step interrupted it, in place of `trace`: all of its tokens are given."""

    @property
    def is_whole_trace(self) -> bool:
        """Whether nothing is left to generate."""
        return self.trace is not None and self.num_given == len(self.trace.token_ids)

    @property
    def has_failed(self) -> bool:
        """Whether the environment failed, so that there is nothing to grade, or the user's reward function."""
        return self.finish_reason in WITHOUT_REWARD

    @property
    def given_ids(self) -> tuple[int, ...]:
        if self.begun is not None:
            return self.begun.response_ids
        return self.trace.token_ids[: self.num_given] if self.trace else ()

    @property
    def given_source(self) -> tuple[Source, ...]:
        if self.begun is not None:
            return self.begun.source
        known = self.trace.source if self.trace else ()
        return known[: self.num_given] or (Source.OFF_POLICY,) * self.num_given

    @property
    def given_logprobs(self) -> tuple[float, ...]:
        if self.begun is not None:
            return self.begun.logp_behavior
        known = self.trace.logprobs if self.trace else None
        return known[: self.num_given] if known else (float("nan"),) * self.num_given

    @property
    def measured(self) -> Mapping[str, float]:
        """The measures, and the number of tokens."""
        return {TOKENS: sum(source is not Source.ENVIRONMENT for source in self._source), **self.measures}

    @property
    def is_interrupted(self) -> bool:
        """Whether a later step continues it, so that there is nothing to grade yet."""
        return self.finish_reason is FinishReason.INTERRUPTED

    def request(self, max_new_tokens: int | None = None) -> RolloutRequest:
        prompt_ids = self.prompt_ids if self.shown is None else self.shown.prompt_ids
        return RolloutRequest(prompt_ids, self.seed, self.given_ids, max_new_tokens)

    def played(self, episode: Episode) -> "Row":
        """The row with the episode that continued it; a whole trace takes only the measures of its replay."""
        reason = episode.finish_reason
        measured = replace(self, measures=episode.measures)
        if not self.is_whole_trace:
            prompt_ids, segments = episode.prompt_ids, episode.segments
            return replace(measured, prompt_ids=prompt_ids, segments=segments, finish_reason=reason)
        return replace(measured, finish_reason=reason) if reason is FinishReason.ENVIRONMENT_ERROR else measured

    def reply(self, decode: Callable[[Sequence[int]], str]) -> str:
        """What is graded: the last turn as text; for a demonstration, the original text of the trace's last turn."""
        if self.trace is not None and self.is_whole_trace:
            return self.trace.reply
        ids = [*zip(self.token_ids, self._source, strict=True)]
        turn = itertools.takewhile(lambda token: token[1] is not Source.ENVIRONMENT, reversed(ids))
        return decode([token_id for token_id, _ in reversed([*turn])])

    def trajectory(self, grade: Grade, reward: float) -> Trajectory:
        """The graded row; tokens of the trace are off-policy, with their author's log-probabilities if known."""
        logp_behavior, weight_version = self.given_logprobs, (DEMONSTRATION_VERSION,) * self.num_given
        if self.begun is not None:
            weight_version = self.begun.weight_version
        for segment in self.segments:
            if isinstance(segment, Completion):
                assert len(segment.weight_versions) == len(segment.token_ids)
                logp_behavior += segment.logprobs
                weight_version += segment.weight_versions
            else:
                logp_behavior += (float("nan"),) * len(segment.token_ids)
                weight_version += (DEMONSTRATION_VERSION,) * len(segment.token_ids)
        shown = self.shown
        given_starts = self.trace.context_starts if self.trace is not None and self.num_given else ()
        return Trajectory(
            prompt_ids=shown.prompt_ids if shown is not None and shown.is_learned_from else self.prompt_ids,
            response_ids=self.token_ids,
            source=self._source,
            logp_behavior=logp_behavior,
            weight_version=weight_version,
            reward=reward,
            outcome=grade.outcome,
            finish_reason=self.finish_reason,
            measures=self.measures,
            start=self.start,
            answer=grade.extracted or "",
            context_starts=given_starts + context_starts(self.segments, self.num_given),
        )

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All tokens of the response."""
        return self.given_ids + tuple(token_id for segment in self.segments for token_id in segment.token_ids)

    @property
    def _source(self) -> tuple[Source, ...]:
        is_bare = self.shown is not None and not self.shown.is_learned_from
        policy, source = Source.HINTED if is_bare else Source.ON_POLICY, self.given_source
        for segment in self.segments:
            source += (policy if isinstance(segment, Completion) else Source.ENVIRONMENT,) * len(segment.token_ids)
        return source


def replayed_row(stored: Trajectory) -> Trajectory:
    """A stored rollout as a row of this step, with its sampled tokens marked as REPLAY."""
    return replace(
        stored,
        source=tuple(source if source is Source.ENVIRONMENT else Source.REPLAY for source in stored.source),
    )


class BusyTime:
    """Measures the time in which at least one thread is at work, since it was last read."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._active = 0
        self._busy = 0.0
        self._changed = self._last_read = time.perf_counter()

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Count the time in this context as busy."""
        self._change(+1)
        try:
            yield
        finally:
            self._change(-1)

    def since_last(self) -> tuple[float, float]:
        """Seconds since the last call, and how many of them were busy."""
        self._change(0)
        with self._lock:
            elapsed, busy = self._changed - self._last_read, self._busy
            self._last_read, self._busy = self._changed, 0.0
        return elapsed, busy

    def _change(self, by: int) -> None:
        with self._lock:
            now = time.perf_counter()
            self._busy += (now - self._changed) if self._active else 0.0
            self._changed = now
            self._active += by


_NO_GRADE = Grade(Outcome.NO_ANSWER, reason="interrupted")


def _with_grade(row: Row, grade: Grade) -> tuple[Row, Grade]:
    """A reward of 0 for an answer on which the user's function failed would train the policy on its faults."""
    return (replace(row, finish_reason=FinishReason.GRADER_ERROR) if math.isnan(grade.reward) else row), grade


@dataclass(slots=True)
class RowSampler:
    """Has the policy continue rows, and grades them.

    A whole trace has nothing to sample and is graded as it is; a prefix and its continuation are graded as one text.

    With `stops` a response ends with the token that completes a stop text; `decode` returns its text up to there.
    With a `player` a response is an episode: an environment answers the policy's turns, and the last turn is graded.
    With `step_tokens` a response is interrupted after so many tokens, and not graded.
    """

    grader: Grader
    decode: Callable[[Sequence[int]], str]
    params: SamplingParams
    player: EpisodePlayer | None
    stops: StopTexts | None
    overlong: OverlongConfig | None = None
    step_tokens: int | None = None
    grading: BusyTime = field(default_factory=BusyTime)
    _graded_in_all: int = 0
    _without_reward: int = 0

    def __post_init__(self) -> None:
        assert self.player is None or self.stops is None, "the turns of an episode end with the stop token"

    def sample(
        self, engine: RolloutEngine, tasks: Sequence[RolloutTask], plans: Sequence[Sequence[Row]]
    ) -> list[list[Trajectory]]:
        """The graded rows of each task's plan, in order; all are sampled in one call of the engine.

        Raises LostError if a judge could not be reached.
        """
        planned = [(task, row) for task, plan in zip(tasks, plans, strict=True) for row in plan if self.is_played(row)]
        finished = iter(self._continued(engine, planned))
        return self._graded(tasks, [[next(finished) if self.is_played(row) else row for row in plan] for plan in plans])

    def grading_s(self) -> float:
        return self.grading.since_last()[1]

    def is_played(self, row: Row) -> bool:
        """Whether the row has to be sampled or, for a whole trace, played again to measure it."""
        return not row.is_whole_trace or (self.player is not None and self.player.scorer.needs_demonstrations)

    def _continued(self, engine: RolloutEngine, planned: Sequence[tuple[RolloutTask, Row]]) -> list[Row]:
        """Each row, continued by the policy: in a single call of the engine, or turn by turn with an environment."""
        if self.player is None:
            completions = engine.generate([row.request(self.step_tokens) for _, row in planned], self.params)
            rows = [row for _, row in planned]
            if self.stops is not None:
                pairs = zip(rows, completions, strict=True)
                completions = [self.stops.cut(completion, row.given_ids) for row, completion in pairs]
            return [
                replace(row, segments=(completion,), finish_reason=self._end(row, completion))
                for row, completion in zip(rows, completions, strict=True)
            ]
        starts = [
            EpisodeStart(
                task.problem,
                task.ground_truth,
                task.messages,
                row.prompt_ids,
                row.seed,
                row.given_ids,
                row.given_source,
                is_whole=row.is_whole_trace,
            )
            for task, row in planned
        ]
        episodes = self.player.play(starts, engine, self.params)
        return [row.played(episode) for (_, row), episode in zip(planned, episodes, strict=True)]

    def _end(self, row: Row, completion: Completion) -> FinishReason:
        num_tokens = len(row.given_ids) + len(completion.token_ids)
        has_room = self.step_tokens is not None and num_tokens < self.params.max_response_tokens
        is_interrupted = has_room and completion.finish_reason is FinishReason.LENGTH
        return FinishReason.INTERRUPTED if is_interrupted else completion.finish_reason

    def _refuse_broken_functions(self, grades: Sequence[Grade]) -> None:
        """Raise ConfigError, with what the function says, where it failed for three quarters of all responses."""
        failed = [grade for grade in grades if math.isnan(grade.reward)]
        self._graded_in_all += len(grades)
        self._without_reward += len(failed)
        if failed and 4 * self._without_reward >= 3 * self._graded_in_all:
            raise ConfigError(
                f"grading: {self._without_reward} of {self._graded_in_all} responses have no reward: "
                f"{failed[0].reason}; mend the function"
            )

    def _graded(self, tasks: Sequence[RolloutTask], rows: Sequence[Sequence[Row]]) -> list[list[Trajectory]]:
        requests = [
            GradeRequest(
                row.reply(self.decode),
                task.ground_truth,
                task.problem,
                measures=row.measured,
                has_failed=row.has_failed,
            )
            for task, found in zip(tasks, rows, strict=True)
            for row in found
            if not row.is_interrupted
        ]
        with self.grading.measured():
            grades = self.grader.grade(requests)
        # A reward of 0 for every answer would train the policy on the judge's absence.
        require_verdicts(grades, "responses", "the same command resumes after the last checkpoint")
        self._refuse_broken_functions(grades)
        each = iter(grades)
        graded = [
            [_with_grade(row, _NO_GRADE if row.is_interrupted else next(each)) for row in found] for found in rows
        ]

        def trajectory(row: Row, grade: Grade) -> Trajectory:
            if row.is_interrupted:
                return row.trajectory(grade, math.nan)
            if row.has_failed:
                return row.trajectory(grade, 0.0)
            reward = grade.reward
            if self.player is not None:
                reward = self.player.scorer.reward(reward, row.measured)
            if self.overlong is not None and not row.is_whole_trace:
                reward += self.overlong.punishment(len(row.token_ids), self.params.max_response_tokens)
            return row.trajectory(grade, reward)

        return [[trajectory(row, grade) for row, grade in found] for found in graded]

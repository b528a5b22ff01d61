"""One row of a group, from its plan to a graded trajectory.

A row begins with none of a trace's tokens (a rollout), some (a prefix-conditioned row, which the policy continues) or
all (a demonstration).
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from luffy.environments.episodes import Episode, Segment, context_starts
from luffy.grading import Grade
from luffy.rl.tasks import Demonstration
from luffy.rollout.engine import Completion, RolloutRequest
from luffy.types import FinishReason, Hint, Message, Source, Trajectory

DEMONSTRATION_VERSION = -1
"""Weight version of tokens that were not sampled in this run."""
_Item = TypeVar("_Item")


@dataclass(frozen=True, slots=True)
class HintedPrompt:
    """A prompt with a hint in it."""

    prompt_ids: tuple[int, ...]
    hint: Hint
    is_learned_from: bool
    """Whether rows are learned under this prompt; otherwise under the bare one."""


@dataclass(frozen=True, slots=True)
class Row:
    """What a row begins with, and what the policy sampled after it, perhaps in several turns."""

    prompt_ids: tuple[int, ...]
    seed: int = 0
    """Seed for the sampled tokens."""
    trace: Demonstration | None = None
    num_given: int = 0
    """Number of tokens of `trace` that the row begins with."""
    segments: tuple[Segment, ...] = ()
    """Turns of the policy, and what the environment wrote between them. Empty before generation, and for a whole
    trace."""
    finish_reason: FinishReason = FinishReason.STOP
    measures: Mapping[str, float] = field(default_factory=dict, hash=False)
    """Measures of the episode (`Episode.measures`)."""
    completion: tuple[Message, ...] = ()
    """The episode's conversation after the prompt, for measures of the group."""
    hinted: HintedPrompt | None = None
    """The prompt to sample under in place of `prompt_ids`; None: the bare one."""

    @property
    def is_whole_trace(self) -> bool:
        """Whether nothing is left to generate."""
        return self.trace is not None and self.num_given == len(self.trace.token_ids)

    @property
    def has_failed(self) -> bool:
        """Whether the environment failed, so that there is nothing to grade."""
        return self.finish_reason is FinishReason.ENVIRONMENT_ERROR

    @property
    def given_ids(self) -> tuple[int, ...]:
        return self.trace.token_ids[: self.num_given] if self.trace else ()

    @property
    def given_source(self) -> tuple[Source, ...]:
        known = self.trace.source if self.trace else ()
        return known[: self.num_given] or (Source.OFF_POLICY,) * self.num_given

    @property
    def given_logprobs(self) -> tuple[float, ...]:
        known = self.trace.logprobs if self.trace else None
        return known[: self.num_given] if known else (float("nan"),) * self.num_given

    @property
    def _given_starts(self) -> tuple[int, ...]:
        return self.trace.context_starts if self.trace is not None and self.num_given else ()

    def request(self) -> RolloutRequest:
        """The engine's request for the continuation."""
        prompt_ids = self.prompt_ids if self.hinted is None else self.hinted.prompt_ids
        return RolloutRequest(prompt_ids, self.seed, self.given_ids)

    def continued(self, completion: Completion) -> "Row":
        """The row with what the policy sampled in a single turn."""
        return replace(self, segments=(completion,), finish_reason=completion.finish_reason)

    def played(self, episode: Episode) -> "Row":
        """The row with the episode that continued it; a whole trace takes only the measures of its replay."""
        if self.is_whole_trace:
            has_failed = episode.finish_reason is FinishReason.ENVIRONMENT_ERROR
            reason = episode.finish_reason if has_failed else self.finish_reason
            return replace(self, measures=episode.measures, completion=episode.completion, finish_reason=reason)
        return replace(
            self,
            prompt_ids=episode.prompt_ids,
            segments=episode.segments,
            finish_reason=episode.finish_reason,
            measures=episode.measures,
            completion=episode.completion,
        )

    def reply(self, decode: Callable[[Sequence[int]], str]) -> str:
        """What is graded: the last turn as text; for a demonstration, the original text of the trace's last turn."""
        if self.trace is not None and self.is_whole_trace:
            return self.trace.reply
        ids = [*zip(self._token_ids, self._source, strict=True)]
        turn = itertools.takewhile(lambda token: token[1] is not Source.ENVIRONMENT, reversed(ids))
        return decode([token_id for token_id, _ in reversed([*turn])])

    def trajectory(self, grade: Grade, reward: float | None = None) -> Trajectory:
        """The graded row; tokens of the trace are off-policy, with their author's log-probabilities if known.

        `reward`: from the scoring of an episode; None: from `grade`.
        """
        return Trajectory(
            prompt_ids=self._learned_prompt_ids,
            response_ids=self._token_ids,
            source=self._source,
            logp_behavior=self.given_logprobs + _joined(self.segments, _logprobs_of),
            weight_version=(DEMONSTRATION_VERSION,) * self.num_given + _joined(self.segments, _versions_of),
            reward=grade.reward if reward is None else reward,
            outcome=grade.outcome,
            finish_reason=self.finish_reason,
            measures=self.measures,
            hint=None if self.hinted is None else self.hinted.hint,
            context_starts=self._given_starts + context_starts(self.segments, self.num_given),
        )

    @property
    def _learned_prompt_ids(self) -> tuple[int, ...]:
        return self.hinted.prompt_ids if self.hinted is not None and self.hinted.is_learned_from else self.prompt_ids

    @property
    def _token_ids(self) -> tuple[int, ...]:
        return self.given_ids + _joined(self.segments, lambda segment: segment.token_ids)

    @property
    def _source(self) -> tuple[Source, ...]:
        return self.given_source + _joined(self.segments, self._source_of)

    def _source_of(self, segment: Segment) -> tuple[Source, ...]:
        if not isinstance(segment, Completion):
            return (Source.ENVIRONMENT,) * len(segment.token_ids)
        is_bare = self.hinted is not None and not self.hinted.is_learned_from
        return (Source.HINTED if is_bare else Source.ON_POLICY,) * len(segment.token_ids)


def _logprobs_of(segment: Segment) -> tuple[float, ...]:
    return segment.logprobs if isinstance(segment, Completion) else (float("nan"),) * len(segment.token_ids)


def _versions_of(segment: Segment) -> tuple[int, ...]:
    if isinstance(segment, Completion):
        assert len(segment.weight_versions) == len(segment.token_ids)
        return segment.weight_versions
    return (DEMONSTRATION_VERSION,) * len(segment.token_ids)


def _joined(segments: Sequence[Segment], part: Callable[[Segment], tuple[_Item, ...]]) -> tuple[_Item, ...]:
    return tuple(item for segment in segments for item in part(segment))


def replayed_row(stored: Trajectory) -> Trajectory:
    """A stored rollout as a row of this step, with its sampled tokens marked as REPLAY."""
    return replace(
        stored,
        source=tuple(source if source is Source.ENVIRONMENT else Source.REPLAY for source in stored.source),
    )

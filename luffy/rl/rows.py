"""One row of a group: planned, generated, graded.

A row begins with tokens of a trace (none: a rollout; all: a demonstration; some: a hybrid row), which the policy
continues unless they are the whole trace.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from luffy.grading import Grade
from luffy.rl.tasks import Demonstration
from luffy.rollout.engine import Completion, RolloutRequest
from luffy.types import FinishReason, Source, Trajectory

DEMONSTRATION_VERSION = -1
"""Weight version of tokens that no weights of this run have sampled."""


@dataclass(frozen=True, slots=True)
class PlannedRow:
    """A row before generation."""

    prompt_ids: tuple[int, ...]
    seed: int = 0
    """Seed of the continuation."""
    guide: Demonstration | None = None
    num_given: int = 0
    """Tokens of `guide` that the row begins with."""

    @property
    def is_complete(self) -> bool:
        """Whether the whole trace is given, so that nothing is generated."""
        return self.guide is not None and self.num_given == len(self.guide.token_ids)

    @property
    def given_ids(self) -> tuple[int, ...]:
        return self.guide.token_ids[: self.num_given] if self.guide else ()

    @property
    def given_logprobs(self) -> tuple[float, ...]:
        known = self.guide.logprobs if self.guide else None
        return known[: self.num_given] if known else (float("nan"),) * self.num_given

    def request(self) -> RolloutRequest:
        """The engine's request for the continuation."""
        return RolloutRequest(self.prompt_ids, self.seed, self.given_ids)


@dataclass(frozen=True, slots=True)
class GeneratedRow:
    """A row with its whole response, before grading."""

    plan: PlannedRow
    completion: Completion | None
    """None: the plan was complete."""

    @property
    def response_ids(self) -> tuple[int, ...]:
        return self.plan.given_ids + (self.completion.token_ids if self.completion else ())

    def text(self, decode: Callable[[Sequence[int]], str]) -> str:
        """The response as one text; that of a demonstration as it was written."""
        if self.completion is None and self.plan.guide is not None:
            return self.plan.guide.text
        return decode(self.response_ids)

    def trajectory(self, grade: Grade) -> Trajectory:
        """The graded row: the given tokens off-policy with their author's log-probabilities, the rest on-policy."""
        own = self.completion or _NOTHING
        given, sampled = self.plan.num_given, len(own.token_ids)
        assert len(own.weight_versions) == sampled
        return Trajectory(
            prompt_ids=self.plan.prompt_ids,
            response_ids=self.response_ids,
            source=(Source.OFF_POLICY,) * given + (Source.ON_POLICY,) * sampled,
            logp_behavior=self.plan.given_logprobs + own.logprobs,
            weight_version=(DEMONSTRATION_VERSION,) * given + own.weight_versions,
            reward=grade.reward,
            outcome=grade.outcome,
            finish_reason=own.finish_reason,
        )


_NOTHING = Completion((), (), FinishReason.STOP, ())


def replayed_row(stored: Trajectory) -> Trajectory:
    """A stored rollout as a row of this step: its tokens become REPLAY, all else stays, its reward included."""
    return replace(stored, source=(Source.REPLAY,) * len(stored.source))

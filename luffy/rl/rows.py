"""One row of a group: planned, generated, graded.

A row is given tokens of a trace (none: a rollout; all: a demonstration; some: a hybrid row), and the policy goes on
behind them unless they are the whole trace.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from luffy.grading import Grade
from luffy.rl.tasks import Demonstration
from luffy.rollout.engine import Completion, RolloutRequest
from luffy.types import FinishReason, Source, Trajectory

DEMONSTRATION_VERSION = -1
"""Weight version of tokens that no weights of this run have drawn."""


@dataclass(frozen=True, slots=True)
class PlannedRow:
    """What will be given and what will be drawn."""

    prompt_ids: tuple[int, ...]
    seed: int = 0
    """Of the continuation."""
    guide: Demonstration | None = None
    num_given: int = 0
    """Tokens of `guide` that are given."""

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
        """What the engine is asked for."""
        return RolloutRequest(self.prompt_ids, self.seed, self.given_ids)


@dataclass(frozen=True, slots=True)
class GeneratedRow:
    """A whole response, not graded yet."""

    plan: PlannedRow
    completion: Completion | None
    """None: the plan was complete."""

    @property
    def response_ids(self) -> tuple[int, ...]:
        return self.plan.given_ids + (self.completion.token_ids if self.completion else ())

    def text(self, decode: Callable[[Sequence[int]], str]) -> str:
        """The response as one text; a demonstration has its own."""
        if self.completion is None and self.plan.guide is not None:
            return self.plan.guide.text
        return decode(self.response_ids)

    def trajectory(self, grade: Grade) -> Trajectory:
        """The graded row: the given tokens off-policy with their author's log-probabilities, the rest on-policy."""
        own = self.completion or _NOTHING
        given, drawn = self.plan.num_given, len(own.token_ids)
        assert len(own.weight_versions) == drawn
        return Trajectory(
            prompt_ids=self.plan.prompt_ids,
            response_ids=self.response_ids,
            source=(Source.OFF_POLICY,) * given + (Source.ON_POLICY,) * drawn,
            logp_behavior=self.plan.given_logprobs + own.logprobs,
            weight_version=(DEMONSTRATION_VERSION,) * given + own.weight_versions,
            reward=grade.reward,
            outcome=grade.outcome,
            finish_reason=own.finish_reason,
        )


_NOTHING = Completion((), (), FinishReason.STOP, ())


def replayed_row(stored: Trajectory) -> Trajectory:
    """A stored rollout as a row of this step: its tokens are REPLAY; what was recorded stays, its reward included."""
    return replace(stored, source=(Source.REPLAY,) * len(stored.source))

"""One row of a group, from its plan to a graded trajectory.

A row begins with none of a trace's tokens (a rollout), some (a prefix-conditioned row, which the policy continues) or
all (a demonstration).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from luffy.grading import Grade
from luffy.rl.tasks import Demonstration
from luffy.rollout.engine import Completion, RolloutRequest
from luffy.types import FinishReason, Source, Trajectory

DEMONSTRATION_VERSION = -1
"""Weight version of tokens that were not sampled in this run."""
_NOTHING = Completion((), (), FinishReason.STOP, ())


@dataclass(frozen=True, slots=True)
class Row:
    """What a row begins with, and what the policy sampled after it."""

    prompt_ids: tuple[int, ...]
    seed: int = 0
    """Seed for the sampled tokens."""
    trace: Demonstration | None = None
    num_given: int = 0
    """Number of tokens of `trace` that the row begins with."""
    sampled: Completion = _NOTHING
    """Empty before generation, and for a whole trace."""

    @property
    def is_whole_trace(self) -> bool:
        """Whether nothing is left to generate."""
        return self.trace is not None and self.num_given == len(self.trace.token_ids)

    @property
    def given_ids(self) -> tuple[int, ...]:
        return self.trace.token_ids[: self.num_given] if self.trace else ()

    @property
    def given_logprobs(self) -> tuple[float, ...]:
        known = self.trace.logprobs if self.trace else None
        return known[: self.num_given] if known else (float("nan"),) * self.num_given

    def request(self) -> RolloutRequest:
        """The engine's request for the continuation."""
        return RolloutRequest(self.prompt_ids, self.seed, self.given_ids)

    def text(self, decode: Callable[[Sequence[int]], str]) -> str:
        """The response as text; for a demonstration, the original text of the trace."""
        if self.trace is not None and self.is_whole_trace:
            return self.trace.text
        return decode(self.given_ids + self.sampled.token_ids)

    def trajectory(self, grade: Grade) -> Trajectory:
        """The graded row; tokens of the trace are off-policy, with their author's log-probabilities if known."""
        given, own = self.num_given, self.sampled
        assert len(own.weight_versions) == len(own.token_ids)
        return Trajectory(
            prompt_ids=self.prompt_ids,
            response_ids=self.given_ids + own.token_ids,
            source=(Source.OFF_POLICY,) * given + (Source.ON_POLICY,) * len(own.token_ids),
            logp_behavior=self.given_logprobs + own.logprobs,
            weight_version=(DEMONSTRATION_VERSION,) * given + own.weight_versions,
            reward=grade.reward,
            outcome=grade.outcome,
            finish_reason=own.finish_reason,
        )


def replayed_row(stored: Trajectory) -> Trajectory:
    """A stored rollout as a row of this step, with its tokens marked as REPLAY."""
    return replace(stored, source=(Source.REPLAY,) * len(stored.source))

"""What the collector rolls out: a prompt in tokens, its traces, and a stored success to replay."""

from dataclasses import dataclass, field

from luffy.grading import Problem
from luffy.types import Trajectory


@dataclass(frozen=True, slots=True)
class Demonstration:
    """A trace in tokens, the stop token at its end."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...] | None
    """The author's log-probabilities, where known."""


@dataclass(frozen=True, slots=True)
class RolloutTask:
    """A prompt in tokens, with its reference answer and its traces."""

    uid: str
    prompt_ids: tuple[int, ...]
    ground_truth: str
    demonstrations: tuple[Demonstration, ...]
    replayed: Trajectory | None = None
    """A stored success of the policy itself, in place of one rollout."""
    problem: Problem = field(default_factory=Problem)
    """What grading may use besides the reference answer."""

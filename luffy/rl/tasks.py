"""Input of the collector: a tokenized prompt, its traces, and a stored success to replay."""

from dataclasses import dataclass, field

from luffy.grading import Problem
from luffy.types import Trajectory


@dataclass(frozen=True, slots=True)
class Demonstration:
    """A tokenized trace that ends with the stop token."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...] | None
    """Log-probabilities under the model that wrote it, if known."""


@dataclass(frozen=True, slots=True)
class RolloutTask:
    """A tokenized prompt with its reference answer and traces."""

    uid: str
    prompt_ids: tuple[int, ...]
    ground_truth: str
    demonstrations: tuple[Demonstration, ...]
    replayed: Trajectory | None = None
    """A stored success of the policy, which takes the place of one rollout."""
    problem: Problem = field(default_factory=Problem)
    """Input of grading besides the reference answer."""

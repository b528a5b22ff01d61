"""Input of the collector: a tokenized prompt with its traces and a stored success to replay, and its visits."""

from dataclasses import dataclass, field

from luffy.grading import Problem
from luffy.types import Message, Source, Trajectory


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
    problem: Problem = field(default_factory=Problem)
    """Input of grading besides the reference answer."""
    pass_rate: float | None = None
    """Pass rate measured by the stage `difficulty`; None: not measured."""
    messages: tuple[Message, ...] = ()
    """Messages of the prompt, for an environment; may be empty without one."""


@dataclass(frozen=True, slots=True)
class Visit:
    """One occurrence of a task in a step."""

    task: RolloutTask
    step: int
    """The RL step, from 1."""
    repeat: int
    """Number of earlier occurrences of the prompt in this step."""

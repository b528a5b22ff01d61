"""What a grader is asked and what it answers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

from luffy.config.grading import GraderKind, JudgeGrader
from luffy.types import Outcome, Prompt


@dataclass(frozen=True, slots=True)
class Problem:
    """What grading may know of a problem beside the reference answer."""

    question: str = ""
    """The user's last message; an answer that stands in it is not the model's."""
    grader: str | None = None
    """Name of the grader that the problem asks for; None: the default."""
    data_source: str = ""
    extra_info: Mapping[str, object] = field(default_factory=dict)
    """`options` (or `choices`): the texts of a multiple-choice question's options, in order."""
    shown: tuple[str, ...] = ()
    """All that the prompt shows, message by message; an answer that stands in one is not the model's, either."""

    @property
    def options(self) -> Sequence[str]:
        found = self.extra_info.get("options", self.extra_info.get("choices"))
        return [text for text in found if isinstance(text, str)] if isinstance(found, list | tuple) else []


_MIN_SHOWN = 80
"""A turn of the model's own that is shorter is no text that is copied, but an answer that may be due again."""


def problem_of(prompt: Prompt) -> Problem:
    """What `prompt` says of itself to a grader."""
    asked = [message.content for message in prompt.messages if message.role == "user"]
    shown = tuple(
        message.content
        for message in prompt.messages
        if message.role != "assistant" or len(message.content) >= _MIN_SHOWN
    )
    return Problem(asked[-1] if asked else "", prompt.grader, prompt.data_source, prompt.extra_info, shown)


@dataclass(frozen=True, slots=True)
class GradeRequest:
    """A response and the reference answer it is held against."""

    response: str
    ground_truth: str
    problem: Problem = Problem()
    kind: GraderKind | None = None
    """Grades this response, whatever the problem and the default say."""


@dataclass(frozen=True, slots=True)
class Grade:
    """What grading found, and why."""

    outcome: Outcome
    extracted: str | None = None
    """The final answer as the response writes it; None where there is none."""
    reason: str = ""
    """One short phrase."""
    seconds: float = field(default=0.0, compare=False)
    """Of a worker or a judge; 0 where the verdict needed neither, or was remembered."""
    own_reward: float | None = None
    """What the grader gives in place of 1 or 0."""

    @property
    def reward(self) -> float:
        """1 for a correct answer and 0 for any other, unless the grader gives its own."""
        if self.own_reward is not None:
            return self.own_reward
        return 1.0 if self.outcome is Outcome.CORRECT else 0.0

    def saying(self, note: str) -> "Grade":
        """The same grade, its reason preceded by `note`."""
        return replace(self, reason=f"{note}; {self.reason}" if note else self.reason)


class Work(NamedTuple):
    """What a worker process is asked to decide."""

    check: str
    """A key of `luffy.grading.checks.CHECKS`."""
    answer: str
    gold: str
    context: str = ""
    """What else the check wants."""
    note: str = ""
    """What precedes the reason of the grade; of no interest to the worker."""


class JudgeRequest(NamedTuple):
    """An answer, and what a judge is shown with it."""

    answer: str
    gold: str
    question: str


class Judging(NamedTuple):
    """A request to a judge."""

    judge: JudgeGrader
    request: JudgeRequest


class Grader(Protocol):
    """Whatever grades batches of responses."""

    def grade(self, requests: Sequence[GradeRequest]) -> list[Grade]:
        """One grade a request, in order."""
        ...

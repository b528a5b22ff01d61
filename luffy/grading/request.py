"""Requests to a grader and its grades, and the messages between a pool and its workers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from luffy.errors import LostError
from luffy.grading.extract import asks_for_tag
from luffy.types import Message, Outcome, Prompt

if TYPE_CHECKING:  # workers, which grade by what they are sent, do not load the configuration
    from luffy.config.grading import GraderKind, JudgeGrader, RewardModelGrader


@dataclass(frozen=True, slots=True)
class Problem:
    """What a grader may know about a problem in addition to the reference answer."""

    question: str = ""
    """The user's last message; an answer copied from it does not count."""
    grader: str | None = None
    """Name of the problem's grader; None: the default."""
    data_source: str = ""
    extra_info: Mapping[str, object] = field(default_factory=dict)
    """`options` (or `choices`): the texts of a multiple-choice question's options, in order."""
    messages: tuple[Message, ...] = ()
    """The prompt; empty: unknown."""
    in_tag: bool | None = None
    """Whether the prompt wants the answer in `<answer>`; None: unknown, and the form of a reply decides."""

    @property
    def options(self) -> Sequence[str]:
        found = self.extra_info.get("options", self.extra_info.get("choices"))
        return [text for text in found if isinstance(text, str)] if isinstance(found, list | tuple) else []

    @property
    def shown(self) -> list[str]:
        """The prompt's messages; an answer copied from one of them does not count."""
        return [each.content for each in self.messages if each.role != "assistant" or len(each.content) >= _MIN_SHOWN]


_MIN_SHOWN = 80
"""A shorter assistant message in the prompt may be an answer that the model rightly gives again."""


def problem_of(prompt: Prompt, text: str = "") -> Problem:
    """What a grader may know about `prompt`; `text` is any prompt under the experiment's template, "" if unknown."""
    asked = [message.content for message in prompt.messages if message.role == "user"]
    question = asked[-1] if asked else ""
    problem = Problem(question, prompt.grader, prompt.data_source, prompt.extra_info, tuple(prompt.messages))
    in_tag = asks_for_tag("\n".join((text, *problem.shown)))
    # An unknown template may ask for `<answer>`.
    return replace(problem, in_tag=in_tag if text else in_tag or None)


TOKENS = "tokens"
"""The measure that every sampled response has: its tokens, without those that an environment wrote."""


@dataclass(frozen=True, slots=True)
class GradeRequest:
    """A response and its reference answer."""

    response: str
    ground_truth: str
    problem: Problem = Problem()
    kind: GraderKind | None = None
    """Grades this response; None: the problem's grader, or the default."""
    measures: Mapping[str, float] = field(default_factory=dict, hash=False)
    has_failed: bool = False
    """Whether the episode's environment failed: there is nothing to grade, and the outcome is `crashed`."""


@dataclass(frozen=True, slots=True)
class Grade:
    """The result of grading, with the reason."""

    outcome: Outcome
    extracted: str | None = None
    """The final answer as written in the response; None without one."""
    reason: str = ""
    seconds: float = field(default=0.0, compare=False)
    """Running time of a worker or a judge; 0 when neither was needed or the verdict was remembered."""
    own_reward: float | None = None
    """The grader's own reward, in place of 1 or 0; NaN: a function of the user's has failed, and there is none."""
    is_unjudged: bool = False
    """Whether a judge was needed and could not be reached: the grade says nothing about the answer."""

    @property
    def reward(self) -> float:
        """1 for a correct answer and 0 for any other, unless the grader gives its own reward, or none: NaN."""
        if self.own_reward is not None:
            return self.own_reward
        return 1.0 if self.outcome is Outcome.CORRECT else 0.0

    def saying(self, note: str) -> Grade:
        """The same grade with `note` in front of its reason."""
        return replace(self, reason=f"{note}; {self.reason}" if note else self.reason)


def require_verdicts(grades: Sequence[Grade], graded: str, consequence: str) -> None:
    """Raise LostError if a judge could not be reached for one of `grades`: that is not a verdict on the answer.

    The message counts them as `graded` ("responses") and ends with the `consequence`: what is kept, how to continue.
    """
    lost = [grade for grade in grades if grade.is_unjudged]
    if lost:
        raise LostError(f"{len(lost)} of {len(grades)} {graded} have no verdict ({lost[0].reason}); {consequence}")


class Verification(NamedTuple):
    """A check for a worker process."""

    check: str
    """A key of `luffy.grading.checks.CHECKS`."""
    answer: str
    gold: str
    context: str = ""
    note: str = ""
    """Put in front of the grade's reason; workers do not need it."""


class JudgeRequest(NamedTuple):
    """An answer for a judge, and what it is shown with it."""

    judge: JudgeGrader
    answer: str
    gold: str
    question: str


class RewardRequest(NamedTuple):
    """A conversation for a reward model; its last message is the response."""

    kind: RewardModelGrader
    messages: tuple[Message, ...]


class Grader(Protocol):
    """Grades batches of responses."""

    def grade(self, requests: Sequence[GradeRequest]) -> list[Grade]:
        """Return one grade for each request, in order."""


READY = "ready"
"""The only word of a worker's first message."""
LOAD = "load"
"""The check that only loads a user's function, whose path stands in place of the answer."""


class Reply(NamedTuple):
    """A worker's verdict."""

    outcome: Outcome
    reason: str
    reward: float | None = None
    misconfigured: bool = False
    """The check itself is wrong (a function that cannot be imported): `reason` is for the user."""


def send(connection: Connection, message: tuple[object, ...]) -> None:
    """Send one message to the other side, without waiting for an answer."""
    # JSON instead of pickle: a response is untrusted text, and ASCII escapes carry even lone surrogates.
    connection.send_bytes(json.dumps(message).encode())


def receive(connection: Connection) -> list[Any]:
    """Return the fields of the next message; EOFError when the other side is gone."""
    return json.loads(connection.recv_bytes())

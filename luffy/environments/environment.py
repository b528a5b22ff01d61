"""The interface of environments, which answer the policy's turns until an episode ends, and the state of their tools.

An environment that counts the turns, for a notebook:

    class CountTo:
        async def reset(self, problem: Problem) -> Sequence[Message]:
            self.left = 3
            return ()

        async def respond(self, conversation: Sequence[Message]) -> Sequence[Message] | None:
            self.left -= 1
            return [Message("user", f"{self.left} turns left")] if self.left else None

        def counts(self) -> Mapping[str, float]:
            return {}

        async def close(self) -> None: ...
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Protocol, runtime_checkable

import numpy as np

from luffy.grading.request import Problem
from luffy.types import Message

_POLICY = "assistant"
_UNWRITABLE = re.compile("[\x00\ud800-\udfff]")
_MESSAGES = "a list of messages, each a luffy.types.Message or a mapping with role and content"


class Environment(Protocol):
    """One episode. An object is used for a single episode, so it may keep the episode's state in its attributes.

    An exception from a method, or a result of another type, is a bug of the environment: it ends the episode as
    `crashed`. What a tool does wrong is not an exception but a message to the policy. Messages may also be mappings
    with `role` and `content`; characters that cannot be written (NUL, lone surrogates) are replaced.
    """

    async def reset(self, problem: Problem) -> Sequence[Message]:
        """Begin the episode. Returns messages that follow the prompt's own, usually none."""

    async def respond(self, conversation: Sequence[Message]) -> Sequence[Message] | None:
        """Answer the policy's newest turn, the last message of `conversation`.

        `conversation` starts with the prompt and is what the policy sees: messages longer than
        `limits.max_observation_tokens` are cut, so keep the state of the episode in attributes. Returns messages of
        other roles than `assistant`, at least one, or None when the episode is over.
        """

    def counts(self) -> Mapping[str, float]:
        """Finite numbers of the episode so far, by name (`tool_calls`, `tool_errors`), for metrics and samples."""

    async def close(self) -> None:
        """Free what the episode holds; called once, also after an exception or a cancellation."""


@runtime_checkable
class ScoringEnvironment(Environment, Protocol):
    """An environment that scores its episodes by itself."""

    async def score(self, conversation: Sequence[Message]) -> None:
        """Score the finished episode; `counts` has the scores afterwards.

        Called once, also where a bound ended the episode: `conversation` may then end with a turn that `respond` was
        not asked about.
        """


EnvironmentFactory = Callable[[], Environment]
"""Makes the environment of a new episode."""
Closing = Callable[[], object]
"""Frees something; may be an `async def`."""


class ToolError(Exception):
    """For tools to raise: the message is shown to the policy as it is, and the call counts as failed.

    The policy sees type and message of any other exception, too.
    """


class EpisodeState(dict[str, object]):
    """A dictionary that the tools of one episode share, empty at its start.

        def remember(key: str, value: str, *, state: EpisodeState) -> str:
            \"\"\"Keep a value for later.\"\"\"
            state[key] = value
            return "kept"

    The environment passes the parameter: it is not part of the tool's schema, and the policy cannot set it. Tools in
    one turn run one after another, so it needs no lock.
    """

    def __init__(self, problem: Problem) -> None:
        super().__init__()
        self.problem = problem
        self._closings: list[Closing] | None = []

    def on_close(self, closing: Closing) -> None:
        """Call `closing` when the episode ends, before those that were registered earlier.

        Raises RuntimeError when the episode has ended, as it may have for a tool that ran past its time limit: the tool
        then has to free its resources itself.
        """
        if self._closings is None:
            raise RuntimeError("the episode has ended")
        self._closings.append(closing)

    def end(self) -> Sequence[Closing]:
        """Return the registered functions in the order to call them; nothing can be registered after that."""
        closings, self._closings = self._closings or [], None
        return closings[::-1]


def writable(text: str) -> str:
    """The text with a replacement character for each one that a tokenizer or a file may not take."""
    return _UNWRITABLE.sub("\ufffd", text)


def received_messages(method: str, found: object) -> list[Message]:
    """The messages that a method of an environment returned; mappings become messages, as verifiers writes them."""
    if isinstance(found, str) or not isinstance(found, Sequence):
        raise TypeError(f"{method} returned {found!r:.80}, and has to return {_MESSAGES}")
    messages = []
    for each in found:
        fields = {"role": each.role, "content": each.content} if isinstance(each, Message) else each
        if not isinstance(fields, Mapping):
            raise TypeError(f"{method} returned {each!r:.80} among its messages, and has to return {_MESSAGES}")
        role, content = fields.get("role"), fields.get("content")
        if not isinstance(role, str) or not isinstance(content, str):
            raise TypeError(f"{method} returned the message {each!r:.80}, whose role and content have to be text")
        if role == _POLICY:
            raise TypeError(f"{method} returned a message of the role {_POLICY}, which is the policy's own")
        messages.append(Message(role, writable(content)))
    return messages


def received_counts(found: object) -> dict[str, float]:
    """The numbers that `counts` returned, by name."""
    if not isinstance(found, Mapping):
        raise TypeError(f"counts returned {found!r:.80}, and has to return numbers by name")
    return {str(name): finite_number(f"count {name}", value) for name, value in found.items()}


def finite_number(name: str, found: object) -> float:
    """The number in Python's own type, also where it is one of numpy's; TypeError where it is no finite number."""
    value = found.item() if isinstance(found, np.generic) else found
    if not isinstance(value, Real) or not math.isfinite(value):
        raise TypeError(f"{name} is {found!r:.80}, which is no finite number")
    return float(value)

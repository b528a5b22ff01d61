"""The interface of environments, which answer the policy's turns until an episode ends.

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

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, runtime_checkable

from luffy.grading.request import Problem
from luffy.types import Message


class Environment(Protocol):
    """One episode. An object is used for a single episode, so it may keep the episode's state in its attributes.

    An exception from a method, or a result of another type, is a bug of the environment: it ends the episode as
    `crashed`. What a tool does wrong is not an exception but a message to the policy. Messages may also be mappings
    with `role` and `content`; characters that cannot be written (NUL, lone surrogates) are replaced.
    """

    async def reset(self, problem: Problem) -> Sequence[Message]:
        """Begin the episode. Returns messages that follow the prompt's own, usually none."""
        ...

    async def respond(self, conversation: Sequence[Message]) -> Sequence[Message] | None:
        """Answer the policy's newest turn, the last message of `conversation`.

        `conversation` starts with the prompt and is what the policy sees: messages longer than
        `limits.max_observation_tokens` are cut, so keep the state of the episode in attributes. Returns messages of
        other roles than `assistant`, at least one, or None when the episode is over.
        """
        ...

    def counts(self) -> Mapping[str, float]:
        """Finite numbers of the episode so far, by name (`tool_calls`, `tool_errors`), for metrics and samples."""
        ...

    async def close(self) -> None:
        """Free what the episode holds; called once, also after an exception or a cancellation."""
        ...


@runtime_checkable
class ScoringEnvironment(Environment, Protocol):
    """An environment that scores its episodes by itself."""

    async def score(self, conversation: Sequence[Message]) -> None:
        """Score the finished episode; `counts` has the scores afterwards.

        Called once, also where a bound ended the episode: `conversation` may then end with a turn that `respond` was
        not asked about.
        """
        ...


EnvironmentFactory = Callable[[], Environment]
"""Makes the environment of a new episode."""

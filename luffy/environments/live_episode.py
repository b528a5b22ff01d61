"""The environment's side of an episode, and the rule of turns, shared by all kinds of players.

    live = LiveEpisode(start, make, scorer)
    end = await live.play(turns(live))      # `turns` has the policy write, and returns the finish reason
    await live.close()

A player decides how the policy writes a turn: as token ids (`episodes.py`), or as text (`text_episodes.py`).
"""

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar, cast

from luffy.environments.environment import (
    Environment,
    EnvironmentFactory,
    ScoringEnvironment,
    received_counts,
    received_messages,
)
from luffy.environments.rubric import TURNS, EpisodeScorer, EpisodeView
from luffy.errors import EnvironmentFault, LostError, UserError
from luffy.grading.request import Problem
from luffy.seeds import derive_seed
from luffy.types import FinishReason, Message, Source

logger = logging.getLogger(__name__)
_Result = TypeVar("_Result")
_LONGEST_FAULT = 300


@dataclass(frozen=True, slots=True)
class EpisodeStart:
    """A prompt, and the part of a recorded episode that this one continues."""

    problem: Problem
    ground_truth: str
    messages: tuple[Message, ...]
    """Messages of the prompt."""
    prompt_ids: tuple[int, ...]
    """Empty for a model that answers with text."""
    seed: int
    """Decides the sampled tokens of every turn."""
    given_ids: tuple[int, ...] = ()
    """Start of the response. Its turns are replayed, so that the environment is in the state after them."""
    given_source: tuple[Source, ...] = ()
    """Source of each of `given_ids`: an author or the environment."""
    is_whole: bool = False
    """Whether the given tokens are a whole recorded episode, which is played again and not continued."""

    def turn_seed(self, turn: int) -> int:
        """Seed of a turn, from 0. The first has the row's own, so that an episode of one turn is a plain rollout."""
        return derive_seed(self.seed, "turn", turn) if turn else self.seed


@dataclass(frozen=True, slots=True)
class EpisodeEnd:
    """How an episode ended, and its measures."""

    finish_reason: FinishReason
    measures: Mapping[str, float]
    """Counts of the environment, `turns` (those of the policy, given ones included), and what the scorer measures."""
    fault: str = ""
    """Why the environment failed, if it did."""


class TurnWriter(Protocol):
    """The policy's side of an episode."""

    async def write(self, turn: int) -> tuple[Message | None, FinishReason | None]:
        """The policy's next turn, counted from 0; with a finish reason where no answer of the environment follows.

        A reason without a turn: the policy has no other.
        """
        ...

    def show(self, messages: Sequence[Message]) -> bool:
        """Append the environment's messages; False, and nothing appended, where they leave no room for a turn."""
        ...


class LiveEpisode:
    """An environment with the conversation so far. Its methods raise FailedEpisode where the environment fails."""

    def __init__(self, start: EpisodeStart, make: EnvironmentFactory, scorer: EpisodeScorer) -> None:
        self.start = start
        self.conversation: list[Message] = list(start.messages)
        self.num_turns = 0
        self._make = make
        self._environment: Environment | None = None
        self._scorer = scorer

    @property
    def completion(self) -> tuple[Message, ...]:
        """Everything after the prompt."""
        return tuple(self.conversation[len(self.start.messages) :])

    async def play(self, turns: Awaitable[FinishReason]) -> EpisodeEnd:
        """Await the turns, then measure the episode; the caller has to close it in any case.

        A failure of the environment is logged and becomes the finish reason; any other exception is passed on.
        """
        try:
            return EpisodeEnd(await turns, await self._measured())
        except FailedEpisode as failure:
            logger.warning("%s: the environment failed", self.start.problem.data_source, exc_info=failure.__cause__)
            fault = f"{type(failure.__cause__).__name__}: {failure.__cause__}"[:_LONGEST_FAULT]
            return EpisodeEnd(FinishReason.ENVIRONMENT_ERROR, {TURNS: float(self.num_turns)}, fault)

    async def take_turns(self, policy: TurnWriter, max_turns: int) -> FinishReason:
        """Policy and environment in turns until one of them ends the episode; returns why it ended."""
        for turn in itertools.count():
            written, finish = await policy.write(turn)
            if finish is not None:
                if written is not None:
                    self.take(written)
                return finish
            assert written is not None
            messages = await self.respond(written)
            if messages is None:
                return FinishReason.STOP
            if self.num_turns >= max_turns:
                return FinishReason.TURNS
            if not policy.show(messages):
                return FinishReason.LENGTH
        raise AssertionError("unreachable")

    async def reset(self) -> Sequence[Message]:
        """Begin the episode; returns the messages that the environment adds to the prompt, for `observe`."""

        async def opening() -> list[Message]:
            self._environment = self._make()
            return received_messages("reset", await self._environment.reset(self.start.problem))

        return await called(opening())

    async def respond(self, turn: Message) -> Sequence[Message] | None:
        """The environment's answer to the policy's next turn; None when the episode is over."""
        self.take(turn)

        async def answer() -> list[Message] | None:
            found = await self._begun.respond(tuple(self.conversation))
            if found is None:
                return None
            if not (messages := received_messages("respond", found)):
                raise TypeError("respond returned no message; None says that the episode is over")
            return messages

        return await called(answer())

    def take(self, turn: Message) -> None:
        """Append a turn of the policy that gets no answer."""
        self.conversation.append(turn)
        self.num_turns += 1

    def observe(self, messages: Sequence[Message]) -> None:
        """Append messages of the environment."""
        self.conversation += messages

    @property
    def _begun(self) -> Environment:
        assert self._environment is not None, "reset comes first"
        return self._environment

    async def _measured(self) -> dict[str, float]:
        """All counts and measures of an episode that has ended."""
        if isinstance(self._environment, ScoringEnvironment):
            await called(self._environment.score(tuple(self.conversation)))

        async def counted() -> dict[str, float]:
            return received_counts(self._begun.counts())

        counts = {**await called(counted()), TURNS: float(self.num_turns)}
        view = EpisodeView(
            prompt=self.start.messages,
            completion=self.completion,
            answer=self.start.ground_truth,
            info=self.start.problem.extra_info,
            task=self.start.problem.data_source,
            counts=counts,
        )
        return counts | await called(self._scorer.measure(view))

    async def close(self) -> None:
        """Free the environment's resources; failures are logged."""
        if self._environment is None:
            return
        try:
            await called(self._environment.close())
        except FailedEpisode as failure:  # the episode itself has ended without a failure
            source = self.start.problem.data_source
            logger.warning("%s: closing an episode failed", source, exc_info=failure.__cause__)


class FailedEpisode(Exception):
    """A method of the environment, or a measure, raised; the cause is its exception."""


async def called(method: Awaitable[_Result]) -> _Result:
    """The result of a method of the environment, or of a measure; FailedEpisode where it raises.

    UserError, EnvironmentFault and LostError are passed on: what the environment needs is missing, for the other
    episodes, too.
    """
    try:
        return await method
    except (UserError, EnvironmentFault, LostError):
        raise
    except asyncio.CancelledError as error:
        if cast(asyncio.Task[object], asyncio.current_task()).cancelling():
            raise
        raise FailedEpisode from error  # of a task of the environment's own
    except (Exception, SystemExit) as error:  # an environment may raise anything, which ends its own episode alone
        raise FailedEpisode from error

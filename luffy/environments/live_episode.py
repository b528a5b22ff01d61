"""The environment's side of an episode, the rule of turns, and the player for models that answer with text.

    live = LiveEpisode(start, make, scorer)
    end = await live.play(turns(live))      # `turns` has the policy write, and returns the finish reason
    await live.close()

A player decides how the policy writes a turn: as token ids (`episodes.py`), or as text, with a model behind OpenAI's
chat protocol (`TextEpisodePlayer`). The rules are the same: limits, finish reasons, measures. What only a tokenizer
knows differs: the limit of the response counts the policy's own tokens, as the server counts them, and a message of the
environment is cut at four characters for each token.
"""

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar, cast

from luffy.config.environment import EpisodeLimits
from luffy.data.conversations import cut
from luffy.environments.environment import (
    Environment,
    EnvironmentFactory,
    ScoringEnvironment,
    received_counts,
    received_messages,
)
from luffy.environments.limits import run_in_loop
from luffy.environments.rubric import TURNS, EpisodeScorer, EpisodeView
from luffy.environments.transcript import after_thinking
from luffy.errors import EnvironmentFault, LostError, UserError
from luffy.grading.request import Problem
from luffy.rollout.engine import SamplingParams
from luffy.rollout.text_endpoint import TextCompletion, TextRequest
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

    def show(self, messages: Sequence[Message]) -> bool:
        """Append the environment's messages; False, and nothing appended, where they leave no room for a turn."""


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
            if (messages := await self.respond(written)) is None:
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
        self.conversation += messages

    @property
    def _begun(self) -> Environment:
        assert self._environment is not None, "reset comes first"
        return self._environment

    async def _measured(self) -> dict[str, float]:
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


_POLICY = "assistant"
_SENT_AS = {"system": "system", _POLICY: _POLICY}
"""Roles that are sent as they are; others become `user`, since the protocol accepts `tool` only for answers to calls
with an id."""
CHARACTERS_PER_TOKEN = 4


@dataclass(frozen=True, slots=True)
class TextEpisode:
    """A finished episode."""

    completion: tuple[Message, ...]
    num_tokens: int
    """Tokens that the policy wrote, as the server counts them."""
    prompt_tokens: int
    """Tokens of the prompts of all turns, each of which has the whole conversation before it."""
    finish_reason: FinishReason
    measures: Mapping[str, float]
    fault: str = ""
    """Why the environment failed, if it did."""


class ChatEndpoint(Protocol):
    """Completes requests of several episodes at once; `luffy.stages.answers.paid.PaidEndpoint` does, and saves them."""

    async def complete(self, request: TextRequest, params: SamplingParams) -> TextCompletion:
        """The completion; LuffyError where there is none, also for all requests after it."""


@dataclass(frozen=True, slots=True)
class TextEpisodePlayer:
    """Plays episodes of one kind of environment; a slow tool delays its own episode alone."""

    make: EnvironmentFactory
    limits: EpisodeLimits
    scorer: EpisodeScorer

    def play(
        self,
        starts: Sequence[EpisodeStart],
        endpoint: ChatEndpoint,
        params: SamplingParams,
        ended: Callable[[int, TextEpisode], None] = lambda place, episode: None,
    ) -> list[TextEpisode]:
        """One episode per start, in order; raises what `EpisodePlayer.play` and the endpoint raise. `ended` is called
        with each as it ends."""

        async def play_one(place: int, start: EpisodeStart) -> TextEpisode:
            play = _TextPlay(LiveEpisode(start, self.make, self.scorer), endpoint, params, self.limits)
            try:
                end = await play.live.play(play.turns())
            finally:
                await play.live.close()
            used = play.num_tokens, play.prompt_tokens
            episode = TextEpisode(play.live.completion, *used, end.finish_reason, end.measures, end.fault)
            ended(place, episode)
            return episode

        async def play_all() -> list[TextEpisode]:
            # All of them end before a failure is raised: a response on its way is paid for.
            return results_of(await asyncio.gather(*map(play_one, itertools.count(), starts), return_exceptions=True))

        return run_in_loop(play_all())


def results_of(found: Iterable[_Result | BaseException]) -> list[_Result]:
    """What `asyncio.gather` found, in order; raises the first exception in it."""
    results = list[_Result]()
    for each in found:
        if isinstance(each, BaseException):
            raise each
        results.append(each)
    return results


_MISSED = (FinishReason.REFUSED, FinishReason.FAILED)


@dataclass(slots=True)
class _TextPlay:
    """An episode in progress."""

    live: LiveEpisode
    endpoint: ChatEndpoint
    params: SamplingParams
    limits: EpisodeLimits
    num_tokens: int = 0
    prompt_tokens: int = 0

    async def turns(self) -> FinishReason:
        self.live.observe(await self.live.reset())
        return await self.live.take_turns(self, self.limits.max_turns)

    async def write(self, turn: int) -> tuple[Message | None, FinishReason | None]:
        room = self.params.max_response_tokens - self.num_tokens
        allowed = min(self.limits.max_turn_tokens or room, room)
        request = TextRequest(tuple(map(as_sent, self.live.conversation)), self.live.start.turn_seed(turn))
        completion = await self.endpoint.complete(request, replace(self.params, max_response_tokens=allowed))
        self.num_tokens += completion.num_tokens
        self.prompt_tokens += completion.prompt_tokens or 0
        if completion.finish_reason in _MISSED:
            return None, completion.finish_reason
        cut_by = FinishReason.TURN_LENGTH if allowed < room else FinishReason.LENGTH
        return Message(_POLICY, completion.text), None if completion.finish_reason is FinishReason.STOP else cut_by

    def show(self, messages: Sequence[Message]) -> bool:
        if self.num_tokens >= self.params.max_response_tokens:
            return False
        self.live.observe([within(message, self.limits.max_observation_tokens) for message in messages])
        return True


def as_sent(message: Message) -> Message:
    """A message as the protocol takes it. Servers want earlier turns without their reasoning."""
    role = _SENT_AS.get(message.role, "user")
    return Message(role, after_thinking(message.content) if role == _POLICY else message.content)


def within(message: Message, max_tokens: int) -> Message:
    """The message, cut in the middle where it has more than four characters for each token."""
    text, limit = message.content, CHARACTERS_PER_TOKEN * max_tokens
    if len(text) <= limit:
        return message
    half = limit // 2
    return Message(message.role, cut(text[:half], len(text) - 2 * half, "characters", text[len(text) - half :]))

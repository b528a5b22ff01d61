"""Episodes with a model behind OpenAI's chat protocol: text in, text out, without token ids.

    player = TextEpisodePlayer(make_environment, limits, scorer)
    episodes = player.play(starts, endpoint, params)

The rules are those of `episodes.py`: limits, finish reasons, measures. What only a tokenizer knows differs: the limit
of the response counts the policy's own tokens, as the server counts them, and a message of the environment is cut at
four characters for each token.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from luffy.config.environment import EpisodeLimits
from luffy.data.cut_messages import cut
from luffy.environments.environment import Environment, EnvironmentFactory
from luffy.environments.limits import run_in_loop
from luffy.environments.live_episode import EpisodeStart, LiveEpisode
from luffy.environments.rubric import EpisodeScorer
from luffy.environments.transcript import after_thinking
from luffy.errors import LuffyError
from luffy.rollout.engine import SamplingParams
from luffy.rollout.text_endpoint import TextCompletion, TextRequest
from luffy.types import FinishReason, Message

_POLICY = "assistant"
_SENT_AS = {"system": "system", _POLICY: _POLICY}
"""Roles that are sent as they are; others become `user`, since the protocol accepts `tool` only for answers to calls
with an id."""
CHARACTERS_PER_TOKEN = 4


@dataclass(frozen=True, slots=True)
class TextEpisode:
    """A finished episode."""

    completion: tuple[Message, ...]
    """The conversation after the prompt."""
    num_tokens: int
    """Tokens that the policy wrote, as the server counts them."""
    finish_reason: FinishReason
    measures: Mapping[str, float]
    fault: str = ""
    """Why the environment failed, if it did."""


class Chat(Protocol):
    """A model that writes one turn after another."""

    @property
    def max_response_tokens(self) -> int:
        """Limit of the model's tokens in all turns together."""
        ...

    async def ask(self, request: TextRequest, max_tokens: int) -> TextCompletion | None:
        """The next turn, of at most `max_tokens`; None if there is no other. What it raises ends the episode."""
        ...


class ChatEndpoint(Protocol):
    """Completes requests of several episodes at once; `luffy.stages.answers.paid.PaidEndpoint` does, and saves them."""

    async def complete(self, request: TextRequest, params: SamplingParams) -> TextCompletion:
        """The completion; LuffyError where there is none."""
        ...


@dataclass(slots=True)
class _EndpointChat:
    """The endpoint of a play; after its first failure no more requests are sent."""

    endpoint: ChatEndpoint
    params: SamplingParams
    failures: list[LuffyError] = field(default_factory=list)

    @property
    def max_response_tokens(self) -> int:
        return self.params.max_response_tokens

    async def ask(self, request: TextRequest, max_tokens: int) -> TextCompletion:
        if self.failures:
            raise self.failures[0]
        try:
            return await self.endpoint.complete(request, replace(self.params, max_response_tokens=max_tokens))
        except LuffyError as error:
            self.failures.append(error)
            raise


class TextEpisodePlayer:
    """Plays episodes of one kind of environment; a slow tool delays its own episode alone."""

    def __init__(self, make: EnvironmentFactory, limits: EpisodeLimits, scorer: EpisodeScorer) -> None:
        self._make = make
        self.limits = limits
        self.scorer = scorer

    def play(self, starts: Sequence[EpisodeStart], endpoint: ChatEndpoint, params: SamplingParams) -> list[TextEpisode]:
        """One episode per start, in order; raises what `EpisodePlayer.play` and the endpoint raise."""
        return run_in_loop(self._play_all(starts, _EndpointChat(endpoint, params)))

    async def _play_all(self, starts: Sequence[EpisodeStart], chat: _EndpointChat) -> list[TextEpisode]:
        # All of them end before a failure is raised: a response on its way is paid for.
        ended = await asyncio.gather(*(self.play_one(start, chat) for start in starts), return_exceptions=True)
        for failure in [*chat.failures, *ended]:
            if isinstance(failure, BaseException):
                raise failure
        return [episode for episode in ended if isinstance(episode, TextEpisode)]

    async def play_one(
        self, start: EpisodeStart, chat: Chat, around: Callable[[Environment], Environment] | None = None
    ) -> TextEpisode:
        """One episode, whose environment `around` may wrap; raises what the chat raises."""
        make = self._make if around is None else lambda: around(self._make())
        play = _TextPlay(LiveEpisode(start, make, self.scorer), chat, self.limits)
        try:
            end = await play.live.play(play.turns())
        finally:
            await play.live.close()
        return TextEpisode(play.live.completion, play.num_tokens, end.finish_reason, end.measures, end.fault)


@dataclass(slots=True)
class _TextPlay:
    """An episode in progress."""

    live: LiveEpisode
    chat: Chat
    limits: EpisodeLimits
    num_tokens: int = 0

    async def turns(self) -> FinishReason:
        """Play the episode; returns why it ended."""
        self.live.observe(await self.live.reset())
        return await self.live.take_turns(self, self.limits.max_turns)

    async def write(self, turn: int) -> tuple[Message | None, FinishReason | None]:
        room = self.chat.max_response_tokens - self.num_tokens
        allowed = min(self.limits.max_turn_tokens or room, room)
        request = TextRequest(tuple(map(as_sent, self.live.conversation)), self.live.start.turn_seed(turn))
        completion = await self.chat.ask(request, allowed)
        if completion is None:
            return None, FinishReason.LENGTH
        self.num_tokens += completion.num_tokens
        cut_by = FinishReason.TURN_LENGTH if allowed < room else FinishReason.LENGTH
        return Message(_POLICY, completion.text), None if completion.finish_reason is FinishReason.STOP else cut_by

    def show(self, messages: Sequence[Message]) -> bool:
        if self.num_tokens >= self.chat.max_response_tokens:
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

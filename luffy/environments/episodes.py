"""Episodes: the policy and its environment in turns, token by token.

    player = EpisodePlayer(make_environment, encoder, limits, scorer)
    episodes = player.play(starts, engine, params)

Episodes run concurrently: while one waits for its tool, the engine generates for the others. A response is
append-only: each turn continues the ids of everything before it, which the engine gets as the request's prefix. Only
with `history: branching` may a turn have a context of its own, where the chat template has rewritten what came before.
"""

import asyncio
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from luffy.config.environment import EpisodeLimits
from luffy.data.conversations import ConversationEncoder
from luffy.environments.environment import EnvironmentFactory
from luffy.environments.episode_loop import run_in_loop
from luffy.environments.live_episode import EpisodeStart, LiveEpisode
from luffy.environments.rubric import EpisodeScorer
from luffy.environments.turn_sampler import TurnSampler
from luffy.rollout.engine import Completion, RolloutEngine, RolloutRequest, SamplingParams
from luffy.types import FinishReason, Message, Source


@dataclass(frozen=True, slots=True)
class Observation:
    """Tokens that the environment wrote between two turns of the policy."""

    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Context:
    """The whole conversation before a turn, as the chat template writes it at that point: all that the turn sees.

    It holds the environment's newest messages, and does not begin with the tokens before it.
    """

    token_ids: tuple[int, ...]


Segment = Completion | Observation | Context


@dataclass(frozen=True, slots=True)
class Episode:
    """A finished episode."""

    prompt_ids: tuple[int, ...]
    """The prompt, with the messages that `Environment.reset` added."""
    segments: tuple[Segment, ...]
    """After the given tokens; the last one is a completion. Empty where the policy had no turn: nothing was left to
    continue, or a bound ended the episode before. A context is among them only with `history: branching`."""
    finish_reason: FinishReason
    measures: Mapping[str, float]
    """`EpisodeEnd.measures`."""
    completion: tuple[Message, ...] = ()
    """The conversation after the prompt."""
    fault: str = ""
    """Why the environment failed, if it did."""


def context_starts(segments: Sequence[Segment], start: int = 0) -> tuple[int, ...]:
    """Places of the contexts in a response whose segments come after `start` tokens."""
    places = itertools.accumulate((len(segment.token_ids) for segment in segments), initial=start)
    return tuple(place for place, segment in zip(places, segments, strict=False) if isinstance(segment, Context))


@dataclass(slots=True)
class _Play:
    """An episode in progress."""

    live: LiveEpisode
    prompt_ids: tuple[int, ...]
    ids: list[int]
    """The response so far, in the present context."""
    segments: list[Segment] = field(default_factory=list)
    context_ids: tuple[int, ...] | None = None
    """What takes the place of the prompt in the present context; None: the prompt itself."""
    num_opening: int = 0
    """Messages of the conversation that the prompt consists of."""

    @property
    def begins_with(self) -> tuple[int, ...]:
        """Tokens that the present context begins with: those of the prompt, or of the re-rendered conversation."""
        return self.prompt_ids if self.context_ids is None else self.context_ids

    @property
    def num_in_context(self) -> int:
        """Tokens of `begins_with` that count towards the limit of the response: those after the data's own prompt. What
        `Environment.reset` added is among them, so that no sequence is longer than prompt and limit together."""
        return len(self.begins_with) - len(self.live.start.prompt_ids)

    @property
    def length(self) -> int:
        """Tokens of the present context that the limit of the response applies to."""
        return self.num_in_context + len(self.ids)


class EpisodePlayer:
    """Plays episodes of one kind of environment.

    `lanes` is the number of calls of the engine that may run at once. With 0 the episodes run in lockstep: each call
    waits for all episodes, so the calls, and the sampled tokens, do not depend on how long tools take.
    """

    def __init__(
        self,
        make: EnvironmentFactory,
        encoder: ConversationEncoder,
        limits: EpisodeLimits,
        scorer: EpisodeScorer,
        lanes: int = 0,
    ) -> None:
        self.scorer = scorer
        self._make = make
        self._lanes = lanes
        self._plays = itertools.count()
        self._encoder = encoder
        self.limits = limits

    def play(self, starts: Sequence[EpisodeStart], engine: RolloutEngine, params: SamplingParams) -> list[Episode]:
        """One episode per start, in order.

        An episode whose environment failed says so (`Episode.fault`); how many may fail is for the caller to decide
        (`failed_share.py`). Whatever the engine raises ends all episodes.
        """
        sampler = TurnSampler(engine, params, self._lanes, len(starts), f"play {next(self._plays)}")
        return run_in_loop(self._play_all(starts, sampler))

    async def _play_all(self, starts: Sequence[EpisodeStart], sampler: TurnSampler) -> list[Episode]:
        with sampler:
            tasks = [asyncio.create_task(self._play(start, index, sampler)) for index, start in enumerate(starts)]
            try:
                return await asyncio.gather(*tasks)
            finally:
                # After a failure of one, the others end and close their environments.
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def _play(self, start: EpisodeStart, index: int, sampler: TurnSampler) -> Episode:
        play = _Play(LiveEpisode(start, self._make, self.scorer), start.prompt_ids, list(start.given_ids))
        try:
            end = await play.live.play(self._turns(play, index, sampler))
        finally:
            sampler.leave()
            await play.live.close()
        segments, completion = tuple(play.segments), play.live.completion
        return Episode(play.prompt_ids, segments, end.finish_reason, end.measures, completion, end.fault)

    async def _turns(self, play: _Play, index: int, sampler: TurnSampler) -> FinishReason:
        finish = await self._open(play, sampler.params.max_response_tokens)
        return await self._take_turns(play, index, sampler) if finish is None else finish

    async def _open(self, play: _Play, limit: int) -> FinishReason | None:
        """Reset the environment and replay the given turns; returns why no turn of the policy follows, if so."""
        live = play.live
        opening = await live.reset()
        if opening and not self._open_with(play, opening, limit):
            return FinishReason.LENGTH
        play.num_opening = len(live.conversation)
        for turn, is_followed in _complete_turns(live.start, self._encoder):
            messages = await self._respond(play, self._encoder.reply(turn))
            if is_followed:  # the recorded answer is kept; the replay only brings the environment into this state
                live.observe(messages or ())
            elif messages is None:
                return FinishReason.STOP
            elif live.start.is_whole or live.num_turns >= self.limits.max_turns:
                return FinishReason.TURNS
            elif not self._observe(play, messages, limit):
                return FinishReason.LENGTH
        return FinishReason.TURNS if live.num_turns >= self.limits.max_turns else None

    def _open_with(self, play: _Play, opening: Sequence[Message], limit: int) -> bool:
        """Append the messages of `reset` to the prompt; False, and nothing appended, where they leave no room for a
        turn."""
        prompt_ids = self._encoder.prompt(play.live.start.messages, opening)
        num_added = len(prompt_ids) - len(play.live.start.prompt_ids)
        if num_added + len(play.ids) >= limit and not play.live.start.is_whole:
            return False
        play.live.observe(opening)
        play.prompt_ids = prompt_ids
        return True

    async def _take_turns(self, play: _Play, index: int, sampler: TurnSampler) -> FinishReason:
        for turn in itertools.count():
            completion = await sampler.sample(index, self._request(play, turn))
            opened = _open_turn(play)
            play.segments.append(completion)
            play.ids += completion.token_ids
            written = self._encoder.reply((*opened, *completion.token_ids))
            if completion.finish_reason is not FinishReason.STOP:
                play.live.take(written)
                is_full = play.length >= sampler.params.max_response_tokens
                return FinishReason.LENGTH if is_full else FinishReason.TURN_LENGTH
            messages = await self._respond(play, written)
            if messages is None:
                return FinishReason.STOP
            if play.live.num_turns >= self.limits.max_turns:
                return FinishReason.TURNS
            if not self._observe(play, messages, sampler.params.max_response_tokens):
                return FinishReason.LENGTH
        raise AssertionError("unreachable")

    async def _respond(self, play: _Play, turn: Message) -> list[Message] | None:
        """The environment's answer to the policy's turn, as the policy sees it; None when the episode is over."""
        messages, limit = await play.live.respond(turn), self.limits.max_observation_tokens
        return None if messages is None else [self._encoder.within(message, limit) for message in messages]

    def _request(self, play: _Play, turn: int) -> RolloutRequest:
        return RolloutRequest(
            play.begins_with,
            play.live.start.turn_seed(turn),
            tuple(play.ids),
            self.limits.max_turn_tokens,
            response_in_prompt=play.num_in_context,
        )

    def _observe(self, play: _Play, messages: Sequence[Message], limit: int) -> bool:
        """Append the environment's messages; False, and nothing appended, where they leave no room for a turn."""
        if self._encoder.history == "branching":
            return self._branch(play, messages, limit)
        ids = self._encoder.between(messages)
        if play.length + len(ids) >= limit:
            return False
        play.live.observe(messages)
        play.segments.append(Observation(ids))
        play.ids += ids
        return True

    def _branch(self, play: _Play, messages: Sequence[Message], limit: int) -> bool:
        """Like `_observe`, with the conversation as the template writes it now.

        Where that only extends what the policy has seen and written, the turn continues the present context.
        """
        prompt, turns = play.live.start.messages, [*play.live.conversation[play.num_opening :], *messages]
        opening = play.live.conversation[len(prompt) : play.num_opening]
        seen = (*play.begins_with, *play.ids)
        ids, is_new = self._encoder.continued(seen, prompt, turns, opening)
        if len(ids) + (0 if is_new else len(seen)) - len(play.live.start.prompt_ids) >= limit:
            return False
        play.live.observe(messages)
        if is_new:
            play.segments.append(Context(ids))
            play.context_ids, play.ids = ids, []
        else:
            play.segments.append(Observation(ids))
            play.ids += ids
        return True


def _complete_turns(start: EpisodeStart, encoder: ConversationEncoder) -> list[tuple[tuple[int, ...], bool]]:
    """The given turns that end with the stop token, or with a whole recorded episode, and whether given tokens follow
    them."""
    turns = []
    place = 0
    for source, run in itertools.groupby(start.given_source):
        end = place + len(list(run))
        ids = start.given_ids[place:end]
        is_followed = end < len(start.given_ids)
        is_complete = encoder.is_stopped(ids) or (start.is_whole and not is_followed)
        if source is not Source.ENVIRONMENT and is_complete:
            turns.append((ids, is_followed))
        place = end
    return turns


def _open_turn(play: _Play) -> tuple[int, ...]:
    """The given tokens of an unfinished turn, which the policy continues; empty where it begins a turn."""
    given = play.live.start.given_source
    if play.segments or not given or given[-1] is Source.ENVIRONMENT:
        return ()
    begin = max((place + 1 for place, source in enumerate(given) if source is Source.ENVIRONMENT), default=0)
    return play.live.start.given_ids[begin:]

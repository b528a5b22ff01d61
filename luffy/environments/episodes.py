"""Episodes: the policy and its environment in turns, token by token.

    player = EpisodePlayer(make_environment, encoder, limits, scorer)
    episodes = player.play(starts, engine, params)

Episodes run concurrently: while one waits for its tool, the engine generates for the others. A response is
append-only: each turn continues the ids of everything before it, which the engine gets as the request's prefix.
"""

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from luffy.config.environment import EpisodeLimits
from luffy.data.conversations import ConversationEncoder
from luffy.environments.environment import Environment, EnvironmentFactory, ScoringEnvironment
from luffy.environments.rubric import TURNS, EpisodeScorer, EpisodeView
from luffy.environments.turn_sampler import TurnSampler
from luffy.errors import EnvironmentFault, UserError
from luffy.grading import Problem
from luffy.rollout.engine import Completion, RolloutEngine, RolloutRequest, SamplingParams
from luffy.seeds import derive_seed
from luffy.types import FinishReason, Message, Source

logger = logging.getLogger(__name__)
_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class Observation:
    """Tokens that the environment wrote between two turns of the policy."""

    token_ids: tuple[int, ...]


Segment = Completion | Observation


@dataclass(frozen=True, slots=True)
class EpisodeStart:
    """A prompt, and the part of a recorded episode that this one continues."""

    problem: Problem
    ground_truth: str
    messages: tuple[Message, ...]
    """The prompt's."""
    prompt_ids: tuple[int, ...]
    seed: int
    """Decides the sampled tokens of every turn."""
    given_ids: tuple[int, ...] = ()
    """Start of the response. Its turns are replayed, so that the environment is in the state that they left."""
    given_source: tuple[Source, ...] = ()
    """Who wrote each of them: an author or the environment."""


@dataclass(frozen=True, slots=True)
class Episode:
    """A finished episode."""

    prompt_ids: tuple[int, ...]
    """With what `Environment.reset` added."""
    segments: tuple[Segment, ...]
    """After the given tokens; the last one is a completion. Empty where the policy had no turn."""
    finish_reason: FinishReason
    measures: Mapping[str, float]
    """Counts of the environment, `turns` (those of the policy, given ones included), and what the scorer measures."""


@dataclass(slots=True)
class _Play:
    """An episode in progress."""

    start: EpisodeStart
    environment: Environment
    prompt_ids: tuple[int, ...]
    ids: list[int]
    """The response so far."""
    conversation: list[Message]
    segments: list[Segment] = field(default_factory=list)
    num_turns: int = 0


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
        self._limits = limits

    def play(self, starts: Sequence[EpisodeStart], engine: RolloutEngine, params: SamplingParams) -> list[Episode]:
        """One episode per start, in order.

        Raises EnvironmentFault when more than `max_failed_share` of the episodes failed by an exception of the
        environment. Whatever the engine raises ends all episodes.
        """
        sampler = TurnSampler(engine, params, self._lanes, len(starts), f"play {next(self._plays)}")
        episodes = asyncio.run(self._play_all(starts, sampler))
        failed = sum(episode.finish_reason is FinishReason.ENVIRONMENT_ERROR for episode in episodes)
        if failed > self._limits.max_failed_share * len(episodes):
            raise EnvironmentFault(
                f"the environment failed in {failed} of {len(episodes)} episodes (the log has its exceptions); "
                f"allowed is a share of {self._limits.max_failed_share:g} (environment.limits.max_failed_share)"
            )
        return episodes

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
        play = _Play(start, self._make(), start.prompt_ids, list(start.given_ids), list(start.messages))
        try:
            try:
                finish = await self._open(play, sampler.params.max_response_tokens)
                if finish is None:
                    finish = await self._take_turns(play, index, sampler)
                measures = await self._measured(play)
            except _FailedCall as failure:
                logger.warning("%s: the environment failed", start.problem.data_source, exc_info=failure.__cause__)
                finish, measures = FinishReason.ENVIRONMENT_ERROR, {TURNS: float(play.num_turns)}
        finally:
            sampler.leave()
            await _closed(play)
        return Episode(play.prompt_ids, tuple(play.segments), finish, measures)

    async def _measured(self, play: _Play) -> dict[str, float]:
        """Everything that is counted and measured of an episode that has ended."""
        if isinstance(play.environment, ScoringEnvironment):
            await _called(play.environment.score(tuple(play.conversation)))
        counts = {**await _called(_counts(play.environment)), TURNS: float(play.num_turns)}
        return counts | await _called(self.scorer.measure(_view(play, counts)))

    async def _open(self, play: _Play, limit: int) -> FinishReason | None:
        """Reset the environment and replay the given turns; returns why no turn of the policy follows, if so."""
        opening = await _called(play.environment.reset(play.start.problem))
        if opening:
            play.conversation += opening
            play.prompt_ids = self._encoder.prompt(play.conversation)
        for turn, is_followed in _complete_turns(play.start, self._encoder):
            messages = await self._respond(play, turn)
            if is_followed:  # what was recorded stands; the environment only had to get into this state
                play.conversation += messages or ()
            elif messages is None:
                return FinishReason.STOP
            elif not self._observe(play, messages, limit):
                return FinishReason.LENGTH
        return None

    async def _take_turns(self, play: _Play, index: int, sampler: TurnSampler) -> FinishReason:
        for turn in itertools.count():
            completion = await sampler.sample(index, self._request(play, turn))
            opened = _open_turn(play)
            play.segments.append(completion)
            play.ids += completion.token_ids
            if completion.finish_reason is not FinishReason.STOP:
                play.conversation.append(self._encoder.reply((*opened, *completion.token_ids)))
                play.num_turns += 1
                is_full = len(play.ids) >= sampler.params.max_response_tokens
                return FinishReason.LENGTH if is_full else FinishReason.TURN_LENGTH
            messages = await self._respond(play, (*opened, *completion.token_ids))
            if messages is None:
                return FinishReason.STOP
            if play.num_turns >= self._limits.max_turns:
                return FinishReason.TURNS
            if not self._observe(play, messages, sampler.params.max_response_tokens):
                return FinishReason.LENGTH
        raise AssertionError("unreachable")

    def _request(self, play: _Play, turn: int) -> RolloutRequest:
        # The first turn has the row's own seed, so that an episode of one turn samples what a plain rollout does.
        seed = derive_seed(play.start.seed, "turn", turn) if turn else play.start.seed
        return RolloutRequest(play.prompt_ids, seed, tuple(play.ids), self._limits.max_turn_tokens)

    async def _respond(self, play: _Play, turn_ids: Sequence[int]) -> Sequence[Message] | None:
        play.conversation.append(self._encoder.reply(turn_ids))
        play.num_turns += 1
        return await _called(play.environment.respond(tuple(play.conversation)))

    def _observe(self, play: _Play, messages: Sequence[Message], limit: int) -> bool:
        """Append the environment's messages; False, and nothing appended, where they leave no room for a turn."""
        ids = self._encoder.between(messages, self._limits.max_observation_tokens)
        if len(play.ids) + len(ids) >= limit:
            return False
        play.conversation += messages
        play.segments.append(Observation(ids))
        play.ids += ids
        return True


async def _counts(environment: Environment) -> Mapping[str, float]:
    return environment.counts()


async def _closed(play: _Play) -> None:
    try:
        await _called(play.environment.close())
    except _FailedCall as failure:  # the episode itself has ended well
        logger.warning("%s: closing an episode failed", play.start.problem.data_source, exc_info=failure.__cause__)


def _view(play: _Play, counts: Mapping[str, float]) -> EpisodeView:
    prompt, problem = play.start.messages, play.start.problem
    return EpisodeView(
        prompt=prompt,
        completion=play.conversation[len(prompt) :],
        answer=play.start.ground_truth,
        info=problem.extra_info,
        task=problem.data_source,
        counts=counts,
    )


class _FailedCall(Exception):
    """A method of the environment, or a measure, raised; the cause is its exception."""


async def _called(method: Awaitable[_Result]) -> _Result:
    try:
        return await method
    except (UserError, EnvironmentFault):  # what the environment needs is missing, for the other episodes, too
        raise
    except Exception as error:  # an environment may raise anything, which ends its own episode alone
        raise _FailedCall from error


def _complete_turns(start: EpisodeStart, encoder: ConversationEncoder) -> list[tuple[tuple[int, ...], bool]]:
    """The given turns that end with the stop token, and whether given tokens follow them."""
    turns = []
    place = 0
    for source, run in itertools.groupby(start.given_source):
        end = place + len(list(run))
        ids = start.given_ids[place:end]
        if source is not Source.ENVIRONMENT and encoder.is_stopped(ids):
            turns.append((ids, end < len(start.given_ids)))
        place = end
    return turns


def _open_turn(play: _Play) -> tuple[int, ...]:
    """Given tokens of the turn that the policy continues; empty where it begins one."""
    given = play.start.given_source
    if play.segments or not given or given[-1] is Source.ENVIRONMENT:
        return ()
    begin = max((place + 1 for place, source in enumerate(given) if source is Source.ENVIRONMENT), default=0)
    return play.start.given_ids[begin:]

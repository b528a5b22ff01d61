"""Episodes: the policy and its environment in turns, token by token.

    player = EpisodePlayer(make_environment, encoder, limits, scorer)
    episodes = player.play(starts, engine, params)

Episodes run concurrently: while one waits for its tool, the engine generates for the others. A response is
append-only: each turn continues the ids of everything before it, which the engine gets as the request's prefix. Only
with `history: branching` may a turn have a context of its own, where the chat template has rewritten what came before.
"""

import asyncio
import itertools
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field, replace

from luffy.config.environment import EpisodeLimits
from luffy.data.conversations import ConversationEncoder
from luffy.environments.environment import EnvironmentFactory
from luffy.environments.limits import run_in_loop
from luffy.environments.live_episode import EpisodeStart, LiveEpisode
from luffy.environments.rubric import EpisodeScorer
from luffy.rollout.engine import Completion, RolloutEngine, RolloutRequest, SamplingParams
from luffy.types import FinishReason, Message, Source

_Waiting = tuple[int, RolloutRequest, "asyncio.Future[Completion]"]


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
    completion: tuple[Message, ...] = ()
    fault: str = ""


def context_starts(segments: Sequence[Segment], start: int = 0) -> tuple[int, ...]:
    """Places of the contexts in a response whose segments come after `start` tokens."""
    places = itertools.accumulate((len(segment.token_ids) for segment in segments), initial=start)
    return tuple(place for place, segment in zip(places, segments, strict=False) if isinstance(segment, Context))


class TurnSampler:
    """Collects the requests of `num_episodes` episodes into calls of an engine; belongs to one event loop.

    With `lanes` 0, a call starts when every episode that has not ended waits for one: the calls depend on the episodes
    alone. Otherwise up to `lanes` calls run at once, each in a thread, and a free lane takes its share of the requests
    that wait, so that a slow tool holds up its own episode alone. Requests share their KV cache under `name`: a turn
    does not compute the earlier ones of its episode again.
    """

    def __init__(
        self, engine: RolloutEngine, params: SamplingParams, lanes: int, num_episodes: int, name: str = ""
    ) -> None:
        self.params = params
        self._engine = engine
        self._name = name
        self._free = lanes
        self._threads: ThreadPoolExecutor | None = None
        if lanes:
            import torch  # not above: demonstrations are replayed, and data prepared, by processes that need no torch

            # Threads that compute with as many cores as this one: torch keeps that number for each thread, and vLLM on
            # a CPU refuses a step in a thread with another number than the one that started it.
            self._threads = ThreadPoolExecutor(
                lanes,
                thread_name_prefix="turns",
                initializer=torch.set_num_threads,
                initargs=(torch.get_num_threads(),),
            )
        self._num_playing = num_episodes
        self._waiting: list[_Waiting] = []
        self._calls: set[asyncio.Task[None]] = set()

    async def sample(self, episode: int, request: RolloutRequest) -> Completion:
        """The completion of the request; `episode` orders the requests of a call."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Completion] = loop.create_future()
        self._waiting.append((episode, replace(request, shares_cache_with=self._name), done))
        # Later, so that all requests that become ready now share the calls.
        loop.call_soon(self._start)
        return await done

    def leave(self) -> None:
        """An episode has ended; called once for each."""
        self._num_playing -= 1
        asyncio.get_running_loop().call_soon(self._start)

    def close(self) -> None:
        """End the lanes' threads; a call that runs goes on, unseen."""
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)

    def _start(self) -> None:
        self._waiting = [row for row in self._waiting if not row[2].done()]  # an episode may have been cancelled
        if self._threads is None:
            if self._waiting and len(self._waiting) == self._num_playing:
                batch, self._waiting = sorted(self._waiting, key=lambda row: row[0]), []
                self._deliver(batch, self._call(batch))
            return
        while self._waiting and self._free:
            size = -(-len(self._waiting) // self._free)
            batch, self._waiting = self._waiting[:size], self._waiting[size:]
            self._free -= 1
            call = asyncio.get_running_loop().create_task(self._in_a_lane(self._threads, batch))
            self._calls.add(call)  # the loop itself keeps no strong reference
            call.add_done_callback(self._calls.discard)

    async def _in_a_lane(self, threads: ThreadPoolExecutor, batch: Sequence[_Waiting]) -> None:
        result = await asyncio.get_running_loop().run_in_executor(threads, self._call, batch)
        self._free += 1
        self._deliver(batch, result)
        self._start()

    def _call(self, batch: Sequence[_Waiting]) -> list[Completion] | Exception:
        try:
            return self._engine.generate([request for _, request, _ in batch], self.params)
        except Exception as error:  # noqa: BLE001 - whatever an engine raises is raised to each episode that waits for it
            return error

    def _deliver(self, batch: Sequence[_Waiting], result: list[Completion] | Exception) -> None:
        for index, (_, _, done) in enumerate(batch):
            if done.done():
                continue
            if isinstance(result, Exception):
                done.set_exception(result)
            else:
                done.set_result(result[index])


@dataclass(slots=True)
class EpisodePlayer:
    """Plays episodes of one kind of environment.

    `lanes` is the number of calls of the engine that may run at once. With 0 the episodes run in lockstep: each call
    waits for all episodes, so the calls, and the sampled tokens, do not depend on how long tools take.
    """

    make: EnvironmentFactory
    encoder: ConversationEncoder
    limits: EpisodeLimits
    scorer: EpisodeScorer
    lanes: int = 0
    _plays: Iterator[int] = field(default_factory=itertools.count)

    def play(self, starts: Sequence[EpisodeStart], engine: RolloutEngine, params: SamplingParams) -> list[Episode]:
        """One episode per start, in order.

        An episode whose environment failed says so (`Episode.fault`); how many may fail is for the caller to decide
        (`FailedShare`). Whatever the engine raises ends all episodes.
        """
        name = f"play {next(self._plays)}"
        with closing(TurnSampler(engine, params, self.lanes, len(starts), name)) as sampler:
            return run_in_loop(self._play_all(starts, sampler))

    async def _play_all(self, starts: Sequence[EpisodeStart], sampler: TurnSampler) -> list[Episode]:
        tasks = [asyncio.create_task(self._play(start, index, sampler)) for index, start in enumerate(starts)]
        try:
            return await asyncio.gather(*tasks)
        finally:
            # After a failure of one, the others end and close their environments.
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _play(self, start: EpisodeStart, index: int, sampler: TurnSampler) -> Episode:
        live = LiveEpisode(start, self.make, self.scorer)
        play = _Play(live, self.encoder, self.limits, sampler, index)
        try:
            end = await live.play(play.turns())
        finally:
            sampler.leave()
            await live.close()
        segments = tuple(play.segments)
        return Episode(play.prompt_ids, segments, end.finish_reason, end.measures, live.completion, end.fault)


class _Play:
    """An episode in progress, token by token."""

    def __init__(
        self, live: LiveEpisode, encoder: ConversationEncoder, limits: EpisodeLimits, sampler: TurnSampler, index: int
    ) -> None:
        """`index`: place of the episode among those that are played together."""
        self.live = live
        self.encoder = encoder
        self.limits = limits
        self.sampler = sampler
        self.index = index
        self.prompt_ids = live.start.prompt_ids
        self.begins_with = live.start.prompt_ids
        """Tokens that the present context begins with: those of the prompt, or of the re-rendered conversation."""
        self.ids = list(live.start.given_ids)
        """The response so far, in the present context."""
        self.segments: list[Segment] = []
        self.num_opening = 0
        """Messages of the conversation that the prompt consists of."""
        self.limit = sampler.params.max_response_tokens

    @property
    def num_in_context(self) -> int:
        """Tokens of `begins_with` that count towards the limit of the response: those after the data's own prompt. What
        `Environment.reset` added is among them, so that no sequence is longer than prompt and limit together."""
        return len(self.begins_with) - len(self.live.start.prompt_ids)

    @property
    def length(self) -> int:
        """Tokens of the present context that the limit of the response applies to."""
        return self.num_in_context + len(self.ids)

    async def turns(self) -> FinishReason:
        finish = await self._open()
        return await self.live.take_turns(self, self.limits.max_turns) if finish is None else finish

    async def _open(self) -> FinishReason | None:
        """Reset the environment and replay the given turns; returns why no turn of the policy follows, if so."""
        live, start = self.live, self.live.start
        if opening := await live.reset():
            prompt_ids = self.encoder.prompt(start.messages, opening)
            num_added = len(prompt_ids) - len(start.prompt_ids)
            if num_added + len(self.ids) >= self.limit and not start.is_whole:
                return FinishReason.LENGTH
            live.observe(opening)
            self.prompt_ids = self.begins_with = prompt_ids
        self.num_opening = len(live.conversation)
        end = 0
        for source, run in itertools.groupby(start.given_source):
            begin, end = end, end + len(list(run))
            turn = start.given_ids[begin:end]
            is_followed = end < len(start.given_ids)
            # A given turn is complete when it ends with the stop token, or with a whole recorded episode.
            is_complete = self.encoder.is_stopped(turn) or (start.is_whole and not is_followed)
            if source is Source.ENVIRONMENT or not is_complete:
                continue
            messages = await live.respond(self.encoder.reply(turn))
            if is_followed:  # the recorded answer is kept; the replay only brings the environment into this state
                live.observe(self._seen(messages or ()))
            elif messages is None:
                return FinishReason.STOP
            elif start.is_whole or live.num_turns >= self.limits.max_turns:
                return FinishReason.TURNS
            elif not self.show(messages):
                return FinishReason.LENGTH
        return FinishReason.TURNS if live.num_turns >= self.limits.max_turns else None

    async def write(self, turn: int) -> tuple[Message | None, FinishReason | None]:
        start = self.live.start
        request = RolloutRequest(
            self.begins_with,
            start.turn_seed(turn),
            tuple(self.ids),
            self.limits.max_turn_tokens,
            response_in_prompt=self.num_in_context,
        )
        completion = await self.sampler.sample(self.index, request)
        begun: tuple[int, ...] = ()  # given tokens of an unfinished turn, which the policy continues
        if not self.segments and start.given_source and start.given_source[-1] is not Source.ENVIRONMENT:
            last = (place for place, source in enumerate(start.given_source) if source is Source.ENVIRONMENT)
            begun = start.given_ids[max(last, default=-1) + 1 :]
        self.segments.append(completion)
        self.ids += completion.token_ids
        written = self.encoder.reply((*begun, *completion.token_ids))
        if completion.finish_reason is FinishReason.STOP:
            return written, None
        return written, FinishReason.LENGTH if self.length >= self.limit else FinishReason.TURN_LENGTH

    def show(self, messages: Sequence[Message]) -> bool:
        live, messages, is_new = self.live, self._seen(messages), False
        if self.encoder.history == "branching":
            # The conversation as the template writes it now; the turn continues the present context where that only
            # extends what the policy has seen and written.
            prompt, turns = live.start.messages, [*live.conversation[self.num_opening :], *messages]
            opening = live.conversation[len(prompt) : self.num_opening]
            ids, is_new = self.encoder.continued((*self.begins_with, *self.ids), prompt, turns, opening)
        else:
            ids = self.encoder.between(messages)
        if len(ids) + (-len(live.start.prompt_ids) if is_new else self.length) >= self.limit:
            return False
        live.observe(messages)
        if is_new:
            self.segments.append(Context(ids))
            self.begins_with, self.ids = ids, []
        else:
            self.segments.append(Observation(ids))
            self.ids += ids
        return True

    def _seen(self, messages: Sequence[Message]) -> list[Message]:
        """The environment's messages as the policy sees them, long ones cut."""
        return [self.encoder.within(message, self.limits.max_observation_tokens) for message in messages]

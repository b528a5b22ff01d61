"""Models that answer with tokens, as clients of the asker: an engine with a tokenizer, in single turns or episodes.

`luffy.stages.answers.paid` has those that answer with text.
"""

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from transformers import PreTrainedTokenizerBase

from luffy.config.environment import LANES, EnvironmentConfig
from luffy.config.evaluation import SuiteProtocol
from luffy.config.model import DType
from luffy.data.prompt_templates import ask, stops_of, template_opener
from luffy.data.templates import decode, encode_traces, prompt_opener, stop_token_ids
from luffy.environments.episodes import Episode, EpisodePlayer, context_starts
from luffy.environments.live_episode import EpisodeStart
from luffy.environments.registry import open_player
from luffy.environments.transcript import transcript
from luffy.grading.judge import Judges
from luffy.grading.request import problem_of
from luffy.rollout.engine import Completion, RolloutEngine, RolloutRequest, SamplingParams, StopTexts, SwappableEngine
from luffy.rollout.server_engine import ServerEngine
from luffy.rollout.transformers_engine import TransformersEngine
from luffy.rollout.vllm_engine import VLLMEngine
from luffy.stages.answers.requests import Render, RenderedPrompt, SampleRequest
from luffy.stages.answers.store import ModelAnswer
from luffy.stages.program import StageContext
from luffy.types import FinishReason, Prompt, Source

FULL_BATCHES = 4
"""Batches of prompts per engine call: with continuous batching, slots are idle only at the end of a call."""


class ModelClient(Protocol):
    """A model that can be asked."""

    def generate(
        self, samples: Sequence[SampleRequest], protocol: SuiteProtocol, max_response_tokens: int
    ) -> Iterable[ModelAnswer]:
        """One answer per sample, in order: all are generated when this returns, and decoded as they are consumed."""
        ...


def open_client(
    environment: EnvironmentConfig | None,
    engine: RolloutEngine,
    tokenizer: PreTrainedTokenizerBase,
    lanes: int,
    judges: Judges,
    *,
    for_traces: bool = False,
) -> ModelClient:
    """A client of the engine: for episodes with an environment (the rest is `open_player`'s), or for single turns.

    `for_traces`: the answers carry what traces are made of, log-probabilities or turns.
    """
    if environment is None:
        return TokenModelClient(engine, tokenizer, tokenizer if for_traces else None)
    player = open_player(environment, tokenizer, lanes, judges)
    return EpisodeClient(engine, tokenizer, player, keeps_turns=for_traces)


class TokenModelClient:
    """A model served by an engine that takes and returns token ids.

    With the tokenizer of a `policy`, answers have log-probabilities where they are tokenized as they were sampled.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        tokenizer: PreTrainedTokenizerBase,
        policy: PreTrainedTokenizerBase | None = None,
    ) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._policy = policy

    def generate(
        self, samples: Sequence[SampleRequest], protocol: SuiteProtocol, max_response_tokens: int
    ) -> Iterable[ModelAnswer]:
        """Generate with the engine; a stop text stays in its response."""
        params = sampling_params(protocol, max_response_tokens, stop_token_ids(self._tokenizer))
        # A template may have opened the reasoning in the prompt: without its opener, a box inside unfinished reasoning
        # would pass for an answer.
        opener = template_opener(self._tokenizer, protocol.template)
        return self.complete([RolloutRequest(each.rendered.ids, each.seed) for each in samples], params, opener)

    def complete(
        self, requests: Sequence[RolloutRequest], params: SamplingParams, opener: str
    ) -> Iterable[ModelAnswer]:
        """One answer per request, in order, which begins with `opener`."""
        stops = StopTexts(params.stop, partial(decode, self._tokenizer))
        return map(partial(self._answer, stops=stops, opener=opener), self._engine.generate(requests, params))

    def _answer(self, completion: Completion, stops: StopTexts, opener: str) -> ModelAnswer:
        """The text up to and including the first stop text, and its number of tokens."""
        text, num_tokens = stops.read(completion.token_ids)
        reason = completion.finish_reason if num_tokens is None else FinishReason.STOP
        num_tokens = len(completion.token_ids) if num_tokens is None else num_tokens
        known = self._logprobs(opener + text, completion) if reason is FinishReason.STOP else None
        return ModelAnswer(opener + text, num_tokens, reason, logprobs=known)

    def _logprobs(self, text: str, completion: Completion) -> tuple[float, ...] | None:
        """Those of the sampled tokens; None where the policy writes the text with other tokens."""
        if self._policy is None or tuple(encode_traces(self._policy, [text])[0]) != completion.token_ids:
            return None
        return tuple(min(value, 0.0) for value in completion.logprobs)  # rounding may leave 1e-9 above


class EpisodeClient:
    """Plays an episode for every sample; its last turn is the reply that is graded."""

    def __init__(
        self,
        engine: RolloutEngine,
        tokenizer: PreTrainedTokenizerBase,
        player: EpisodePlayer,
        *,
        keeps_turns: bool = False,
    ) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._player = player
        self._keeps_turns = keeps_turns
        self._opener = prompt_opener(tokenizer)

    def generate(
        self, samples: Sequence[SampleRequest], protocol: SuiteProtocol, max_response_tokens: int
    ) -> Iterable[ModelAnswer]:
        """One episode per sample, in order."""
        params = sampling_params(protocol, max_response_tokens, stop_token_ids(self._tokenizer))
        return map(self._answer, self._player.play([episode_start(sample) for sample in samples], self._engine, params))

    def _answer(self, episode: Episode) -> ModelAnswer:
        source = [
            Source.ON_POLICY if isinstance(segment, Completion) else Source.ENVIRONMENT
            for segment in episode.segments
            for _ in segment.token_ids
        ]
        ids = list(itertools.chain.from_iterable(segment.token_ids for segment in episode.segments))
        last = episode.segments[-1].token_ids if episode.segments else ()
        return ModelAnswer(
            text=self._opener
            + transcript(ids, source, self._text, episode.prompt_ids, context_starts(episode.segments)),
            num_tokens=source.count(Source.ON_POLICY),
            finish_reason=episode.finish_reason,
            reply=self._opener + self._text(last),
            turns=episode.completion if self._keeps_turns else (),
            measures=episode.measures,
        )

    def _text(self, token_ids: Sequence[int]) -> str:
        return decode(self._tokenizer, token_ids)


def render_as_ids(tokenizer: PreTrainedTokenizerBase) -> Render:
    """Renders prompts as token ids."""

    def render(prompts: Sequence[Prompt], template: str) -> list[RenderedPrompt]:
        return [RenderedPrompt(decode(tokenizer, ids), ids=tuple(ids)) for ids in ask(tokenizer, prompts, template)]

    return render


def sampling_params(
    protocol: SuiteProtocol, max_response_tokens: int, stop_token_ids: tuple[int, ...]
) -> SamplingParams:
    """The engine's parameters for a suite."""
    stop = (*stops_of(protocol.template), *protocol.stop)
    return SamplingParams(protocol.temperature, max_response_tokens, stop_token_ids, protocol.top_p, stop)


def episode_start(sample: SampleRequest) -> EpisodeStart:
    """The start of the sample's episode."""
    prompt = sample.prompt
    return EpisodeStart(problem_of(prompt), prompt.ground_truth, prompt.messages, sample.rendered.ids, sample.seed)


@dataclass(frozen=True, slots=True)
class Generator:
    """An engine and its best batch size."""

    engine: SwappableEngine
    batch_size: int
    """Number of prompts per call."""
    calls_at_once: int = 1
    """Number of calls that it answers at the same time."""
    lanes: int = 0
    """Number of engine calls that episodes may have in flight at once; 0: only one."""


def open_generator(engine: str, model: Path, dtype: DType, longest: int, context: StageContext) -> Generator:
    """The engine of that name (`evaluation.engine`) on a model folder; the caller closes it.

    `longest` is the largest number of tokens of a prompt with its response.
    """
    return _GENERATORS[engine](model, dtype, longest, context)


def _embedded(model: Path, dtype: DType, longest: int, context: StageContext) -> Generator:
    batch_size = context.execution.rollout_batch_size
    return Generator(TransformersEngine.from_folder(model, dtype, batch_size), batch_size)


def _vllm(model: Path, dtype: DType, longest: int, context: StageContext) -> Generator:
    config = context.execution.vllm
    batch_size = FULL_BATCHES * config.max_num_seqs
    # The model's full context may need more KV cache than there is; only the longest request has to fit.
    if config.engines == 1:
        engine = VLLMEngine.from_folder(model, config, dtype, max_model_len=longest, reads_text=True)
        return Generator(engine, batch_size, lanes=LANES)
    from luffy.cluster.engine_pool import EnginePool  # imported here so that one engine needs no Ray

    pool = EnginePool(model, context.execution, dtype, max_model_len=longest, out=context.out)
    return Generator(pool, batch_size, config.engines)


def _servers(model: Path, dtype: DType, longest: int, context: StageContext) -> Generator:
    config = context.execution.server
    engine = ServerEngine.from_folder(model, config, dtype, max_model_len=longest)
    return Generator(engine, FULL_BATCHES * config.concurrency * len(config.urls), lanes=LANES)


_GENERATORS: dict[str, Callable[[Path, DType, int, StageContext], Generator]] = {
    "transformers": _embedded,
    "vllm": _vllm,
    "openai": _servers,
}

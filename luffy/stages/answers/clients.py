"""What models are asked, and the clients of the asker: engines with a tokenizer, in single turns or episodes.

The seed of a response depends on (seed, suite, decoding, problem, sample) alone: every checkpoint gets the same random
numbers, and an evaluation that resumes or is batched differently requests the same samples. Nothing here knows about
grading, so questions with equal digests (`Questions.digest`) can share their responses.
`luffy.stages.answers.paid` has the models that answer with text.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar

from transformers import PreTrainedTokenizerBase

from luffy.config.environment import LANES, EnvironmentConfig
from luffy.config.evaluation import EvaluationConfig, SuiteProtocol
from luffy.config.model import DType
from luffy.data.prompt_templates import OWN, ask, stops_of, template_opener
from luffy.data.schema import joined_text
from luffy.data.templates import decode, encode_traces, prompt_opener, stop_token_ids
from luffy.data.tokenizer import tokenizer_difference
from luffy.environments.episodes import Context, Episode, EpisodePlayer, context_starts
from luffy.environments.live_episode import EpisodeStart
from luffy.environments.registry import open_player
from luffy.environments.transcript import trace_turns, transcript
from luffy.errors import DataError
from luffy.grading.judge import Judges
from luffy.grading.request import problem_of
from luffy.rollout.engine import Completion, RolloutEngine, RolloutRequest, SamplingParams, StopTexts, SwappableEngine
from luffy.rollout.kept_engine import open_vllm
from luffy.rollout.transformers_engine import TransformersEngine
from luffy.rollout.vllm_limits import settled
from luffy.seeds import derive_seed
from luffy.stages.answers.store import ModelAnswer
from luffy.stages.program import StageContext
from luffy.types import FinishReason, Message, Origin, Prompt, Source, Trace

_Rendered = TypeVar("_Rendered")


@dataclass(frozen=True, slots=True)
class Suite:
    """Problems that are evaluated together."""

    name: str
    prompts: Sequence[Prompt]


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """A prompt as the model receives it: as token ids, as chat messages, or as text."""

    text: str
    """For records."""
    ids: tuple[int, ...] = ()
    messages: tuple[Message, ...] = ()


Render = Callable[[Sequence[Prompt], str], list[RenderedPrompt]]
"""Renders prompts with the template of that name; DataError for a prompt that does not fit the template."""


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """One response to generate."""

    key: str
    """In an `AnswerStore` of one model."""
    prompt: Prompt
    rendered: RenderedPrompt
    sample: int
    seed: int


def sample_key(suite: str, decoding: str, uid: str, sample: int) -> str:
    """`SampleRequest.key`."""
    return f"{decoding}\t{suite}\t{uid}\t{sample}"


@dataclass(frozen=True, slots=True)
class Questions:
    """Questions that are asked in one way: all of a suite under a decoding, those of a teacher, or a batch of them."""

    suite: str
    decoding: str
    protocol: SuiteProtocol
    max_response_tokens: int
    samples: Sequence[SampleRequest]

    @classmethod
    def of_suite(cls, suite: Suite, decoding: str, config: EvaluationConfig, render: Render, seed: int) -> "Questions":
        """All responses to generate, problem by problem; DataError for a prompt that does not fit the template."""
        protocol, cell = config.protocol(suite.name, decoding), (suite.name, decoding)
        samples = [
            SampleRequest(
                sample_key(*cell, prompt.uid, sample),
                prompt,
                rendered,
                sample,
                derive_seed(seed, "evaluate", *cell, prompt.uid, sample),
            )
            for prompt, rendered in zip(suite.prompts, render(suite.prompts, protocol.template), strict=True)
            for sample in range(protocol.num_samples)
        ]
        return cls(*cell, protocol, config.max_response_tokens, samples)

    def params(self, stop_token_ids: tuple[int, ...]) -> SamplingParams:
        """The engine's parameters."""
        protocol = self.protocol
        stop = (*stops_of(protocol.template), *protocol.stop)
        return SamplingParams(protocol.temperature, self.max_response_tokens, stop_token_ids, protocol.top_p, stop)

    def digest(self, sampled_by: Sequence[str], seed: int) -> str:
        """Hash of everything the responses depend on; `sampled_by` identifies the model, its engine and their code."""
        protocol = self.protocol
        content = {
            "sampled_by": list(sampled_by),
            "cell": [seed, self.suite, self.decoding, protocol.num_samples],
            "sampling": [protocol.temperature, protocol.top_p, self.max_response_tokens],
            "template": [protocol.template, *stops_of(protocol.template), *protocol.stop],
            "problems": [[each.prompt.uid, asdict(each.rendered)] for each in self.samples if each.sample == 0],
        }
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def check_suite(
    suite: Suite,
    tokenizer: PreTrainedTokenizerBase,
    max_response_tokens: int,
    context_length: int | None,
    template: str = OWN,
    section: str = "evaluation",
) -> int:
    """Return the number of tokens of the longest prompt; raises DataError as `check_problems` and `longest_prompt`.

    A part of a suite would be another benchmark under the same name, so nothing is left out.
    """
    lengths = [len(ids) for ids in check_problems(suite, lambda prompts: ask(tokenizer, prompts, template))]
    remedy = f"lower {section}.max_response_tokens, or leave them out of the suite's source"
    return longest_prompt(f"suite {suite.name}", lengths, max_response_tokens, context_length, remedy)


def longest_prompt(asked: str, lengths: Sequence[int], most: int, room: int | None, remedy: str) -> int:
    """The largest of the prompts' `lengths`; DataError, which ends with the `remedy`, where `most` tokens of a response
    exceed with it the `room` of the model's context, None for a model without a stated limit."""
    if room is not None and (too_long := sum(length + most > room for length in lengths)):
        raise DataError(
            f"{asked}: {too_long} of {len(lengths)} prompts do not fit: the longest has {max(lengths)} tokens, and the "
            f"model's context of {room} less {most} for the response leaves {room - most}; {remedy}"
        )
    return max(lengths)


def check_problems(suite: Suite, render: Callable[[Sequence[Prompt]], list[_Rendered]]) -> list[_Rendered]:
    """The rendered prompts; DataError for an empty suite, a repeated problem, or one that does not fit the template."""
    if not suite.prompts:
        raise DataError(
            f"suite {suite.name}: has no problems; remove it from data.suites or give it a source with rows"
        )
    repeated = len(suite.prompts) - len({prompt.uid for prompt in suite.prompts})
    if repeated:
        raise DataError(
            f"suite {suite.name}: {repeated} rows repeat a problem; give each once, and set the number of responses a "
            "problem by num_samples in evaluation.decodings or evaluation.suites"
        )
    try:
        return render(suite.prompts)
    except DataError as error:
        raise DataError(f"suite {suite.name}: {error}") from None


FULL_BATCHES = 4
"""Batches of prompts per engine call: with continuous batching, slots are idle only at the end of a call."""


class ModelClient(Protocol):
    """A model that can be asked."""

    def generate(self, batch: Questions) -> Iterable[ModelAnswer]:
        """One answer per sample, in order: all are generated when this returns, and decoded as they are consumed."""
        ...


def open_client(
    environment: EnvironmentConfig | None,
    tokenizer: PreTrainedTokenizerBase,
    lanes: int,
    judges: Judges,
    policy: PreTrainedTokenizerBase | None = None,
) -> Callable[[RolloutEngine], ModelClient]:
    """Opens clients of engines, as `TokenModelClient`; with an environment for episodes (`open_player`)."""
    player = None if environment is None else open_player(environment, tokenizer, lanes, judges)
    return lambda engine: TokenModelClient(engine, tokenizer, player, policy)


class TokenModelClient:
    """A model served by an engine that takes and returns token ids; with a player, its answers are episodes.

    With the tokenizer of a `policy`, the answers carry what its traces are made of: the turns of an episode, or the
    log-probabilities of a text that the policy writes with the same tokens.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        tokenizer: PreTrainedTokenizerBase,
        player: EpisodePlayer | None = None,
        policy: PreTrainedTokenizerBase | None = None,
    ) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._player = player
        self._keeps_turns = policy is not None
        self._policy = policy if policy is not None and tokenizer_difference(tokenizer, policy) is None else None
        self._text = partial(decode, tokenizer)
        self._opener = "" if player is None else prompt_opener(tokenizer)

    def generate(self, batch: Questions) -> Iterable[ModelAnswer]:
        """Generate with the engine; a stop text stays in its response."""
        params = batch.params(stop_token_ids(self._tokenizer))
        if self._player is not None:
            return map(
                self._of_episode, self._player.play(list(map(episode_start, batch.samples)), self._engine, params)
            )
        # A template may have opened the reasoning in the prompt: without its opener, a box inside unfinished reasoning
        # would pass for an answer.
        opener = template_opener(self._tokenizer, batch.protocol.template)
        stops = StopTexts(params.stop, self._text)

        def answer(sample: SampleRequest, completion: Completion) -> ModelAnswer:
            """The text up to and including the first stop text, and its number of tokens."""
            text, num_tokens = stops.read(completion.token_ids)
            text, reason, logprobs = opener + text, FinishReason.STOP, None
            if num_tokens is None:
                num_tokens, reason = len(completion.token_ids), completion.finish_reason
            policy = self._policy if reason is FinishReason.STOP else None
            if policy is not None and tuple(encode_traces(policy, [text])[0]) == completion.token_ids:
                logprobs = tuple(min(value, 0.0) for value in completion.logprobs)  # rounding may leave 1e-9 above
            return ModelAnswer(text, num_tokens, reason, logprobs=logprobs, prompt_tokens=len(sample.rendered.ids))

        requests = [RolloutRequest(each.rendered.ids, each.seed) for each in batch.samples]
        return map(answer, batch.samples, self._engine.generate(requests, params))

    def _of_episode(self, episode: Episode) -> ModelAnswer:
        """The episode as text; its last turn is the reply that is graded.

        Each turn reads the whole conversation before it, which counts as its prompt.
        """
        ids, source = list[int](), list[Source]()
        prompt_tokens, place = 0, len(episode.prompt_ids)
        for segment in episode.segments:
            if isinstance(segment, Context):
                place = 0  # it begins with the prompt
            is_turn = isinstance(segment, Completion)
            prompt_tokens += place if is_turn else 0
            place += len(segment.token_ids)
            ids += segment.token_ids
            source += [Source.ON_POLICY if is_turn else Source.ENVIRONMENT] * len(segment.token_ids)
        last = episode.segments[-1].token_ids if episode.segments else ()
        return ModelAnswer(
            text=self._opener
            + transcript(ids, source, self._text, episode.prompt_ids, context_starts(episode.segments)),
            num_tokens=source.count(Source.ON_POLICY),
            finish_reason=episode.finish_reason,
            reply=self._opener + self._text(last),
            turns=episode.completion if self._keeps_turns else (),
            measures=episode.measures,
            prompt_tokens=prompt_tokens,
            fault=episode.fault,
        )


def as_trace(sample: SampleRequest, answer: ModelAnswer) -> ModelAnswer:
    """The answer of a client with a policy, where an episode is its turns, as in a trace.

    Raises DataError for an episode in which the environment takes the first turn.
    """
    if answer.reply is None:
        return answer
    turns = trace_turns(answer.turns, sample.prompt.data_source)
    return replace(answer, text=joined_text(answer.turns), turns=turns, reply=None)


def trace_of(answer: ModelAnswer, author: str, model: str, decoding: str, origin: Origin | None = None) -> Trace:
    """An answer of `as_trace` that was graded correct, as a trace."""
    assert answer.text is not None
    return Trace(
        answer.text,
        author,
        verified=True,
        logprobs=answer.logprobs,
        turns=answer.turns,
        model=model,
        decoding=decoding,
        num_tokens=answer.num_tokens,
        origin=origin,
    )


def render_as_ids(tokenizer: PreTrainedTokenizerBase) -> Render:
    """Renders prompts as token ids."""

    def render(prompts: Sequence[Prompt], template: str) -> list[RenderedPrompt]:
        return [RenderedPrompt(decode(tokenizer, ids), ids=tuple(ids)) for ids in ask(tokenizer, prompts, template)]

    return render


def episode_start(sample: SampleRequest) -> EpisodeStart:
    """The start of the sample's episode."""
    prompt, rendered = sample.prompt, sample.rendered
    messages = rendered.messages or prompt.messages
    return EpisodeStart(problem_of(prompt, rendered.text), prompt.ground_truth, messages, rendered.ids, sample.seed)


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


def open_generator(
    engine: str, model: Path, dtype: DType, longest: int, num_responses: int, context: StageContext
) -> Generator:
    """The engine of that name (`evaluation.engine`) on a model folder; the caller closes it.

    `longest` is the largest number of tokens of a prompt with its response, `num_responses` what is left to sample.
    """
    execution = context.execution
    if engine == "transformers":
        batch_size = execution.rollout_batch_size
        return Generator(TransformersEngine.from_folder(model, dtype, batch_size), batch_size)
    # The model's full context may need more KV cache than there is; only the longest request has to fit.
    assert engine == "vllm", engine
    batch_size = FULL_BATCHES * execution.vllm.max_num_seqs
    vllm = settled(execution.vllm, num_responses // execution.vllm.engines, longest)
    if vllm.engines == 1:
        single = open_vllm(model, vllm, dtype, longest=longest, reads_text=True)
        return Generator(single, batch_size, lanes=LANES)
    from luffy.cluster.engine_pool import EnginePool  # imported here so that one engine needs no Ray

    execution = execution.model_copy(update={"vllm": vllm})
    pool = EnginePool(model, execution, dtype, max_model_len=longest, out=context.out)
    return Generator(pool, batch_size, execution.vllm.engines)

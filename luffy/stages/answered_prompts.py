"""A policy's graded answers to every training prompt: what the stages `difficulty` and `sample` have in common.

    answered = answer_prompts(plan, context)
    rates = answered.rates                   # one PassRate per training prompt, in the order of train.parquet
    for prompt in answered.solved(): ...     # with every correct and complete answer as a trace

The seed of a response depends on (seed, suite, decoding, uid, sample) alone. Finished batches of prompts are saved in
shards/: a killed stage continues with the next batch, and a stage that differs only in what it makes of the responses
reuses all of them (`luffy.stages.answer_shards`).
"""

import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from transformers import PreTrainedTokenizerBase

from luffy.config.environment import EnvironmentConfig
from luffy.config.evaluation import DecodingConfig, EvaluationConfig
from luffy.config.grading import GradingConfig
from luffy.config.model import DType
from luffy.data.parquet import iterate_prompts
from luffy.data.pass_rates import PassRate
from luffy.data.templates import load_tokenizer, prompt_lengths
from luffy.environments.registry import open_player
from luffy.errors import DataError
from luffy.evaluation.episode_client import EpisodeClient, open_client
from luffy.evaluation.evaluator import Evaluator
from luffy.evaluation.model_clients import ModelClient, TokenModelClient
from luffy.evaluation.requests import Suite
from luffy.evaluation.sample_records import SampleRecord
from luffy.grading.judge import Judges
from luffy.grading.pool import JUDGE_CACHE, GraderPool
from luffy.rollout.vllm_limits import context_length, read_shape
from luffy.stages.answer_shards import AnswerShards, stages_sampled_alike
from luffy.stages.program import StageContext
from luffy.stages.remembered_answers import RememberedAnswers
from luffy.stages.responses import Generator, ResponseProgress, open_generator
from luffy.types import TOKEN_LIMITS, Prompt, Trace

_SHARDS = "shards"
TRAIN_FILE = "train.parquet"


@dataclass(frozen=True, slots=True)
class AnswerPlan:
    """How the policy is sampled, and whether its answers are kept."""

    section: Literal["difficulty", "sample"]
    """The stage, and its section of the experiment."""
    suite: str
    decoding: str
    """`suite`, `decoding` and `seed` are what the seeds of responses are derived from."""
    seed: int
    num_samples: int
    temperature: float
    max_response_tokens: int
    engine: str
    dtype: DType
    grading: GradingConfig
    keeps_answers: bool
    """Whether correct answers are kept as traces."""
    free_settings: tuple[str, ...]
    """Fields of the section that no response depends on."""
    free_words: str
    """The same in words, e.g. `other bounds`."""
    stop: tuple[str, ...] = ()
    """Texts that end a response."""
    environment: EnvironmentConfig | None = None
    """With an environment, a response is an episode."""


@dataclass(frozen=True, slots=True)
class AnsweredPrompts:
    """All training prompts, answered `num_samples` times each."""

    prompts: Sequence[Prompt]
    """The prompts of `train.parquet` in its order, without their traces."""
    rates: Sequence[PassRate]
    shards: AnswerShards
    resumed_from: int
    """Number of responses that an earlier attempt or another stage had sampled."""

    def solved(self) -> Iterator[Prompt]:
        """Prompts with a correct and complete answer, which are their traces; shortest prompts first.

        Only for a plan that keeps answers.
        """
        return self.shards.solved()


def answer_prompts(plan: AnswerPlan, context: StageContext) -> AnsweredPrompts:
    """Sample and grade what is left of the responses to all training prompts; DataError where prompts do not fit."""
    prompts = list(_prompts(context.inputs["data"] / TRAIN_FILE))
    shards = AnswerShards(context.out / _SHARDS)
    shards.folder.mkdir(exist_ok=True)
    _adopt(shards, plan, context)
    known = dict(shards.finished())
    done = plan.num_samples * len(known)
    if len(known) < len(prompts):
        progress = ResponseProgress(context, plan.num_samples * len(prompts), done)
        waiting = [prompt for prompt in prompts if prompt.uid not in known]
        _answer(plan, waiting, shards, context, progress)
        known = dict(shards.finished())
    return AnsweredPrompts(prompts, [known[prompt.uid] for prompt in prompts], shards, done)


def _prompts(path: Path) -> Iterator[Prompt]:
    """The prompts without their traces, which would take most of the memory."""
    for prompt in iterate_prompts(path):
        yield dataclasses.replace(prompt, traces=())


def _adopt(shards: AnswerShards, plan: AnswerPlan, context: StageContext) -> None:
    """Reuse the responses of a stage that differs in nothing they depend on, unless this one has sampled some."""
    if any(shards.folder.iterdir()):
        return
    alike = stages_sampled_alike(context.out, plan.section, plan.free_settings)
    others = [AnswerShards(directory / _SHARDS) for directory in alike]
    found = shards.adopt_from(others, with_answers=plan.keeps_answers)
    if found is not None:
        context.events.message(f"reuses the responses sampled for {plan.free_words} in {found.parent.name}")


def _answer(
    plan: AnswerPlan,
    waiting: Sequence[Prompt],
    shards: AnswerShards,
    context: StageContext,
    progress: ResponseProgress,
) -> None:
    """Sample and grade the responses to the prompts that have none, and write them to shards."""
    model = context.inputs["model"] / "model"
    tokenizer = load_tokenizer(model)
    lengths = prompt_lengths(tokenizer, [prompt.messages for prompt in waiting])
    longest = _longest(lengths, model, plan)
    # Sorted by length to reduce padding. After a kill, the rest of the same sequence is left, so that the batches are
    # the same as without it.
    order = sorted(range(len(waiting)), key=lambda index: (lengths[index], index))
    generator = open_generator(plan.engine, model, plan.dtype, longest, context)
    memory = _remembered(plan, tokenizer, model)
    try:
        cache = context.out / JUDGE_CACHE
        pool = GraderPool.configured(context.execution.grader_workers, plan.grading, cache)
        with pool as grader, closing(Judges(cache)) as judges:
            evaluator = Evaluator(
                _client(plan, generator, tokenizer, judges, memory),
                grader,
                _protocol(plan),
                plan.seed,
                generator.batch_size,
                calls_at_once=generator.calls_at_once,
                second_grade=False,
                limits=None if plan.environment is None else plan.environment.limits,
            )
            at_once = max(generator.batch_size // plan.num_samples, 1)
            batches = [
                [waiting[index] for index in order[start : start + at_once]] for start in range(0, len(order), at_once)
            ]
            progress.begin()
            graded = evaluator.evaluate(((Suite(plan.suite, batch), plan.decoding) for batch in batches), progress.add)
            for batch, records in zip(batches, graded, strict=True):
                solved = None if memory is None else _solved(batch, records, memory)
                shards.append(_pass_rates(records), solved)
    finally:
        generator.engine.close()


def _protocol(plan: AnswerPlan) -> EvaluationConfig:
    """The evaluation protocol that samples the responses."""
    decoding = DecodingConfig(temperature=plan.temperature, num_samples=plan.num_samples)
    return EvaluationConfig(
        decodings={plan.decoding: decoding}, max_response_tokens=plan.max_response_tokens, stop=plan.stop
    )


def _longest(lengths: Sequence[int], model: Path, plan: AnswerPlan) -> int:
    """Tokens of the longest prompt with a full response; DataError when that exceeds the model's context."""
    most, room = plan.max_response_tokens, context_length(read_shape(model))
    longest = max(lengths) + most
    if room is not None and longest > room:
        too_long = sum(length + most > room for length in lengths)
        raise DataError(
            f"{plan.section}: {too_long} of {len(lengths)} prompts do not fit: the longest has {max(lengths)} tokens, "
            f"and the model's context of {room} less {most} for the response leaves {room - most}; lower "
            f"data.max_prompt_tokens or {plan.section}.max_response_tokens"
        )
    return longest


def _remembered(plan: AnswerPlan, tokenizer: PreTrainedTokenizerBase, model: Path) -> RememberedAnswers | None:
    """A store of responses until they are graded; None where answers are not kept."""
    if not plan.keeps_answers:
        return None
    name = f"{model.parents[1].name}/{model.parent.name}"  # stage and key: the same in every workspace
    return RememberedAnswers(tokenizer, name, f"temperature {plan.temperature:g}")


def _client(
    plan: AnswerPlan,
    generator: Generator,
    tokenizer: PreTrainedTokenizerBase,
    judges: Judges,
    memory: RememberedAnswers | None,
) -> ModelClient:
    """The model, whose responses `memory` keeps."""
    if memory is None:
        return open_client(plan.environment, generator.engine, tokenizer, generator.lanes, judges)
    if plan.environment is None:
        return TokenModelClient(memory.engine(generator.engine), tokenizer)
    player = open_player(plan.environment, tokenizer, generator.lanes, judges)
    return EpisodeClient(generator.engine, tokenizer, memory.player(player))


def _solved(batch: Sequence[Prompt], records: Sequence[SampleRecord], memory: RememberedAnswers) -> list[Prompt]:
    """The prompts with a correct and complete answer, which are their traces in the order of sampling."""
    traces: dict[str, list[Trace]] = {}
    for record in records:
        if (trace := memory.take(record)) is not None:
            traces.setdefault(record.uid, []).append(trace)
    return [dataclasses.replace(prompt, traces=tuple(traces[prompt.uid])) for prompt in batch if prompt.uid in traces]


def _pass_rates(records: Sequence[SampleRecord]) -> list[PassRate]:
    by_prompt: dict[str, list[SampleRecord]] = {}
    for record in records:
        by_prompt.setdefault(record.uid, []).append(record)
    return [_pass_rate(uid, group) for uid, group in by_prompt.items()]


def _pass_rate(uid: str, records: Sequence[SampleRecord]) -> PassRate:
    return PassRate(
        uid=uid,
        outcomes=dict(Counter(record.outcome for record in records)),
        num_tokens=sum(record.num_tokens for record in records),
        num_truncated=sum(record.finish_reason in TOKEN_LIMITS for record in records),
    )

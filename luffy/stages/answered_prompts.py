"""A policy's graded answers to every training prompt: what the stages `difficulty` and `sample` have in common.

    answered = answer_prompts(plan, context)
    rates = answered.rates                   # one PassRate per training prompt, in the order of train.parquet
    for prompt in answered.solved(): ...     # with every correct and complete answer as a trace

The seed of a response depends on (seed, suite, decoding, uid, sample) alone. Finished batches of prompts are saved in
shards/: a killed stage continues with the next batch, and a stage that differs only in what it makes of the responses
reuses all of them. A shard is `000003.json` (pass rates) and, where answers are kept, `000003.parquet`, written first.
"""

import dataclasses
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from transformers import PreTrainedTokenizerBase

from luffy.config.evaluation import DecodingConfig, EvaluationConfig
from luffy.config.grading import GradingConfig
from luffy.config.model import DType
from luffy.data.kept_answers import GradedAnswer
from luffy.data.parquet import iterate_prompts, write_prompts
from luffy.data.pass_rates import PassRate
from luffy.data.templates import encode_traces, load_tokenizer, prompt_lengths
from luffy.errors import DataError
from luffy.evaluation.evaluator import Evaluator
from luffy.evaluation.model_clients import TokenModelClient
from luffy.evaluation.requests import Suite
from luffy.evaluation.sample_records import SampleRecord
from luffy.files import link_or_copy, write_atomic
from luffy.grading import JUDGE_CACHE, GraderPool
from luffy.pipeline.chain.identity import Identity, IdentityRecord, read_identity
from luffy.pipeline.chain.manifest import read_manifest
from luffy.rollout.engine import Completion, RolloutEngine, RolloutRequest, SamplingParams
from luffy.rollout.vllm_limits import context_length, read_shape
from luffy.stages.program import StageContext
from luffy.stages.responses import ResponseProgress, open_generator
from luffy.types import FinishReason, Outcome, Prompt

_SHARDS = "shards"
_AUTHOR = "policy"
TRAIN_FILE = "train.parquet"


@dataclass(frozen=True, slots=True)
class AnswerPlan:
    """How the policy is sampled, and what is kept."""

    section: Literal["difficulty", "sample"]
    """The stage, and its section of the experiment."""
    suite: str
    decoding: str
    """Names from which the seeds of responses are derived, with `seed`."""
    seed: int
    num_samples: int
    temperature: float
    max_response_tokens: int
    engine: str
    dtype: DType
    grading: GradingConfig
    keeps_answers: bool
    free_settings: tuple[str, ...]
    """Fields of the section that no response depends on."""
    free_words: str
    """The same in words, e.g. `other bounds`."""


@dataclass(frozen=True, slots=True)
class AnsweredPrompts:
    """All training prompts, answered `num_samples` times each."""

    prompts: Sequence[Prompt]
    """Without the traces of `train.parquet`, in its order."""
    rates: Sequence[PassRate]
    shards: Path
    resumed_from: int
    """Responses that were there before."""

    def solved(self) -> Iterator[Prompt]:
        """Prompts with a correct and complete answer, which are their traces; shortest prompts first.

        Only of a plan that keeps answers.
        """
        for path in _shards(self.shards):
            yield from iterate_prompts(_answers_file(path))


def answer_prompts(plan: AnswerPlan, context: StageContext) -> AnsweredPrompts:
    """Sample and grade what is left of the responses to all training prompts; DataError where prompts do not fit."""
    prompts = list(_prompts(context.inputs["data"] / TRAIN_FILE))
    shards = context.out / _SHARDS
    shards.mkdir(exist_ok=True)
    _adopt_shards(plan, context)
    known = dict(_finished(shards))
    done = plan.num_samples * len(known)
    if len(known) < len(prompts):
        progress = ResponseProgress(context, plan.num_samples * len(prompts), done)
        _measure(plan, prompts, known, context, progress)
        known = dict(_finished(shards))
    return AnsweredPrompts(prompts, [known[prompt.uid] for prompt in prompts], shards, done)


class _RememberingEngine:
    """An engine that keeps each completion until it is taken, by the seed of its request."""

    def __init__(self, engine: RolloutEngine) -> None:
        self._engine = engine
        self._known: dict[int, Completion] = {}

    def generate(self, requests: Sequence[RolloutRequest], params: SamplingParams) -> list[Completion]:
        """The engine's completions, all of them kept."""
        completions = self._engine.generate(requests, params)
        self._known.update(zip((request.seed for request in requests), completions, strict=True))
        return completions

    def take(self, seed: int) -> Completion:
        """The completion of the request with this seed, which is forgotten."""
        return self._known.pop(seed)

    def close(self) -> None:
        """Free what the engine holds."""
        self._engine.close()


def _prompts(path: Path) -> Iterator[Prompt]:
    """The prompts without their traces, which would take most of the memory."""
    for prompt in iterate_prompts(path):
        yield dataclasses.replace(prompt, traces=())


def _adopt_shards(plan: AnswerPlan, context: StageContext) -> None:
    """Reuse the responses of a stage that differs in nothing they depend on, unless this one has sampled some."""
    own, shards = read_identity(context.out), context.out / _SHARDS
    if own is None or any(shards.iterdir()):
        return
    others = [path for path in sorted(context.out.parent.iterdir()) if path != context.out]
    wanted = _sampling(own, plan)
    alike = [path for path in others if _sampling(read_identity(path), plan) == wanted and not _by_edited_code(path)]
    found = max(([*_shards(path / _SHARDS)] for path in alike), key=len, default=[])
    # In order, so that a kill in between leaves a prefix of the sequence.
    for path in found:
        for file in filter(Path.is_file, (_answers_file(path), path)):
            link_or_copy(str(file), str(shards / file.name))
    if found:
        context.events.message(f"reuses the responses sampled for {plan.free_words} in {found[0].parents[1].name}")


def _by_edited_code(directory: Path) -> bool:
    """Whether code was edited between planning and running the stage in this directory."""
    manifest = read_manifest(directory)
    return manifest is not None and bool(manifest.code_changed)


def _sampling(record: IdentityRecord | None, plan: AnswerPlan) -> tuple[Identity, Mapping[str, str]] | None:
    """Everything that the responses depend on; None without a readable record."""
    section = record.identity.settings.get(plan.section) if record is not None else None
    if record is None or not isinstance(section, dict):
        return None
    sampling = {name: value for name, value in section.items() if name not in plan.free_settings}
    settings = {**record.identity.settings, plan.section: sampling}
    return dataclasses.replace(record.identity, settings=settings), record.consumed


def _measure(
    plan: AnswerPlan,
    prompts: Sequence[Prompt],
    known: Mapping[str, PassRate],
    context: StageContext,
    progress: ResponseProgress,
) -> None:
    """Sample and grade the remaining prompts, and write them to shards."""
    model = context.inputs["model"] / "model"
    tokenizer = load_tokenizer(model)
    lengths = prompt_lengths(tokenizer, [prompt.messages for prompt in prompts])
    longest = _longest(lengths, model, plan)
    # Sorted by length to reduce padding. After a kill, the rest of the same sequence is left, so that the batches are
    # the same as without it.
    order = sorted(range(len(prompts)), key=lambda index: (lengths[index], index))
    waiting = [prompts[index] for index in order if prompts[index].uid not in known]
    generator = open_generator(plan.engine, model, plan.dtype, longest, context)
    memory = _RememberingEngine(generator.engine) if plan.keeps_answers else None
    try:
        cache = context.out / JUDGE_CACHE
        with GraderPool.configured(context.execution.grader_workers, plan.grading, cache) as grader:
            evaluator = Evaluator(
                TokenModelClient(memory or generator.engine, tokenizer),
                grader,
                _protocol(plan),
                plan.seed,
                generator.batch_size,
                calls_at_once=generator.calls_at_once,
                second_grade=False,
            )
            at_once = max(generator.batch_size // plan.num_samples, 1)
            batches = [waiting[start : start + at_once] for start in range(0, len(waiting), at_once)]
            graded = evaluator.evaluate(((Suite(plan.suite, batch), plan.decoding) for batch in batches), progress.add)
            first = _next_number(context.out / _SHARDS)
            for number, (batch, records) in enumerate(zip(batches, graded, strict=True), first):
                path = context.out / _SHARDS / f"{number:06d}.json"
                if memory is not None:
                    _write_answers(_answers_file(path), batch, _answers(plan, records, memory, tokenizer, model))
                _write_rates(path, records)
    finally:
        generator.engine.close()


def _protocol(plan: AnswerPlan) -> EvaluationConfig:
    """The evaluation protocol that samples the responses."""
    decoding = DecodingConfig(temperature=plan.temperature, num_samples=plan.num_samples)
    return EvaluationConfig(decodings={plan.decoding: decoding}, max_response_tokens=plan.max_response_tokens)


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


def _answers(
    plan: AnswerPlan,
    records: Sequence[SampleRecord],
    memory: _RememberingEngine,
    tokenizer: PreTrainedTokenizerBase,
    model: Path,
) -> dict[str, list[GradedAnswer]]:
    """The correct and complete answers by prompt, in the order of sampling."""
    completions = [memory.take(record.seed) for record in records]
    found: dict[str, list[GradedAnswer]] = {}
    for record, completion in zip(records, completions, strict=True):
        answer = GradedAnswer(
            record.response,
            record.num_tokens,
            Outcome(record.outcome),
            record.finish_reason == FinishReason.STOP,
            _AUTHOR,
            model=f"{model.parents[1].name}/{model.parent.name}",  # stage and key: the same in every workspace
            decoding=f"temperature {plan.temperature:g}",
        )
        if answer.may_be_kept:
            known = _logprobs(answer.text, completion, tokenizer)
            found.setdefault(record.uid, []).append(dataclasses.replace(answer, logprobs=known))
    return found


def _logprobs(text: str, completion: Completion, tokenizer: PreTrainedTokenizerBase) -> tuple[float, ...] | None:
    """Those of the sampled tokens, where the text is encoded as these very tokens again."""
    if tuple(encode_traces(tokenizer, [text])[0]) != completion.token_ids:
        return None
    return tuple(min(value, 0.0) for value in completion.logprobs)  # rounding may leave 1e-9 above


def _write_answers(path: Path, batch: Sequence[Prompt], answers: Mapping[str, Sequence[GradedAnswer]]) -> None:
    solved = (prompt for prompt in batch if prompt.uid in answers)
    write_prompts(
        path,
        (
            dataclasses.replace(prompt, traces=tuple(answer.trace() for answer in answers[prompt.uid]))
            for prompt in solved
        ),
    )


def _write_rates(path: Path, records: Sequence[SampleRecord]) -> None:
    """Write the pass rates of a batch to disk, so that a kill cannot lose them."""
    by_prompt: dict[str, list[SampleRecord]] = {}
    for record in records:
        by_prompt.setdefault(record.uid, []).append(record)
    write_atomic(path, json.dumps([asdict(_pass_rate(uid, group)) for uid, group in by_prompt.items()]))


def _pass_rate(uid: str, records: Sequence[SampleRecord]) -> PassRate:
    return PassRate(
        uid=uid,
        outcomes=dict(Counter(record.outcome for record in records)),
        num_tokens=sum(record.num_tokens for record in records),
        num_truncated=sum(record.finish_reason != FinishReason.STOP for record in records),
    )


def _finished(shards: Path) -> Iterator[tuple[str, PassRate]]:
    for path in _shards(shards):
        for fields in json.loads(path.read_text(encoding="utf-8")):
            yield fields["uid"], PassRate(**fields)


def _shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("??????.json"))


def _answers_file(shard: Path) -> Path:
    return shard.with_suffix(".parquet")


def _next_number(shards: Path) -> int:
    return max((int(path.stem) + 1 for path in _shards(shards)), default=0)

"""Selects the training prompts for RL by the pass rate of a policy: neither too hard nor too easy.

Run: python -m luffy.stages.difficulty --config DIR/config.yaml --out DIR

Samples `difficulty.num_samples` responses to every prompt of prepare_data's train.parquet, as an evaluation does, and
grades them as RL does; with an environment a response is an episode. Writes pass_rates.parquet (one row per prompt),
train.parquet (the prompts within the bounds, with traces), tokenizer/, card.json and card.md. RL reads this directory
in place of prepare_data's. sft.parquet, rl_complement.parquet and validation.parquet are not filtered: SFT can use a
trace whether or not the policy solves the prompt, and held-out data must not depend on a policy.

The seed of a response depends on (seed, uid, sample) alone. Finished batches of prompts are saved in shards/: a killed
stage continues with the next batch, and a stage that differs only in its bounds reuses all responses.
"""

import dataclasses
import json
import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from luffy.config.difficulty import DifficultyConfig
from luffy.config.evaluation import DecodingConfig, EvaluationConfig
from luffy.config.settings import DifficultySettings
from luffy.data.parquet import iterate_prompts, write_prompts
from luffy.data.pass_rates import (
    RATES_FILE,
    DifficultyCard,
    Fit,
    PassRate,
    card_json,
    card_markdown,
    difficulty_card,
    fit_of,
    write_pass_rates,
)
from luffy.data.templates import load_tokenizer, prompt_lengths
from luffy.errors import DataError
from luffy.evaluation.episode_client import open_client
from luffy.evaluation.evaluator import Evaluator
from luffy.evaluation.requests import Suite
from luffy.evaluation.sample_records import SampleRecord
from luffy.files import link_or_copy, write_atomic
from luffy.grading import JUDGE_CACHE, GraderPool
from luffy.grading.judge import Judges
from luffy.pipeline.chain.identity import Identity, IdentityRecord, read_identity
from luffy.pipeline.chain.manifest import read_manifest
from luffy.rollout.vllm_limits import context_length, read_shape
from luffy.stages.program import StageContext, StageResult, main
from luffy.stages.responses import ResponseProgress, open_generator
from luffy.training.base_model import copy_tokenizer
from luffy.types import FinishReason, Prompt

logger = logging.getLogger(__name__)
_SHARDS = "shards"
_SUITE = "difficulty"
_DECODING = "pass_rate"
_TRAIN_FILE = "train.parquet"
_CUT = (FinishReason.LENGTH, FinishReason.TURN_LENGTH)


def run(settings: DifficultySettings, context: StageContext) -> StageResult:
    """Measure the pass rate of every training prompt and keep those within the bounds; DataError if there are none."""
    config, out = settings.difficulty, context.out
    tokenizer = load_tokenizer(context.inputs["model"] / "model")
    prompts = list(_prompts(context.inputs["data"] / _TRAIN_FILE))
    (out / _SHARDS).mkdir(exist_ok=True)
    _adopt_shards(context)
    known = dict(_finished(out / _SHARDS))
    done = config.num_samples * len(known)
    if len(known) < len(prompts):
        progress = ResponseProgress(context, config.num_samples * len(prompts), done)
        _measure(prompts, known, tokenizer, settings, context, progress)
        known = dict(_finished(out / _SHARDS))
    rates = [known[prompt.uid] for prompt in prompts]
    fits = [fit_of(rate, config) for rate in rates]
    _refuse_empty(rates, fits, config)
    card = difficulty_card(config, rates, fits, [prompt.data_source for prompt in prompts])
    write_pass_rates(out / RATES_FILE, rates, fits)
    kept = {rate.uid for rate, fit in zip(rates, fits, strict=True) if fit is Fit.KEPT}
    whole = iterate_prompts(context.inputs["data"] / _TRAIN_FILE)
    write_prompts(out / _TRAIN_FILE, (prompt for prompt in whole if prompt.uid in kept))
    copy_tokenizer(context.inputs["data"] / "tokenizer", out / "tokenizer")
    write_atomic(out / "card.json", card_json(card))
    write_atomic(out / "card.md", card_markdown(card))
    return StageResult(
        (RATES_FILE, _TRAIN_FILE, "tokenizer", "card.json", "card.md"), _metrics(card), resumed_from=done
    )


def _prompts(path: Path) -> Iterator[Prompt]:
    """The prompts without their traces, which would take most of the memory."""
    for prompt in iterate_prompts(path):
        yield dataclasses.replace(prompt, traces=())


def _adopt_shards(context: StageContext) -> None:
    """Reuse the responses sampled for other bounds, unless this stage has sampled some itself."""
    own, shards = read_identity(context.out), context.out / _SHARDS
    if own is None or any(shards.iterdir()):
        return
    others = [path for path in sorted(context.out.parent.iterdir()) if path != context.out]
    alike = [
        path for path in others if _measurement(read_identity(path)) == _measurement(own) and not _by_edited_code(path)
    ]
    found = max(([*_shards(path / _SHARDS)] for path in alike), key=len, default=[])
    # In order, so that a kill in between leaves a prefix of the sequence.
    for path in found:
        link_or_copy(str(path), str(shards / path.name))
    if found:
        context.events.message(f"reuses the responses sampled for other bounds in {found[0].parents[1].name}")


def _by_edited_code(directory: Path) -> bool:
    """Whether code was edited between planning and running the stage in this directory."""
    manifest = read_manifest(directory)
    return manifest is not None and bool(manifest.code_changed)


def _measurement(record: IdentityRecord | None) -> tuple[Identity, Mapping[str, str]] | None:
    """Everything that the responses depend on, which is all but the bounds; None without a readable record."""
    difficulty = record.identity.settings.get("difficulty") if record is not None else None
    if record is None or not isinstance(difficulty, dict):
        return None
    sampling = {name: value for name, value in difficulty.items() if name not in ("min_pass_rate", "max_pass_rate")}
    settings = {**record.identity.settings, "difficulty": sampling}
    return dataclasses.replace(record.identity, settings=settings), record.consumed


def _measure(
    prompts: Sequence[Prompt],
    known: Mapping[str, PassRate],
    tokenizer: PreTrainedTokenizerBase,
    settings: DifficultySettings,
    context: StageContext,
    progress: ResponseProgress,
) -> None:
    """Sample and grade the remaining prompts, and write them to shards."""
    config, model = settings.difficulty, context.inputs["model"] / "model"
    lengths = prompt_lengths(tokenizer, [prompt.messages for prompt in prompts])
    longest = _longest(lengths, model, config)
    # Sorted by length to reduce padding. After a kill, the rest of the same sequence is left, so that the batches are
    # the same as without it.
    order = sorted(range(len(prompts)), key=lambda index: (lengths[index], index))
    waiting = [prompts[index] for index in order if prompts[index].uid not in known]
    assert config.engine is not None
    generator = open_generator(config.engine, model, settings.dtype, longest, context)
    try:
        cache = context.out / JUDGE_CACHE
        pool = GraderPool.configured(context.execution.grader_workers, settings.grading, cache)
        with pool as grader, closing(Judges(cache)) as judges:
            evaluator = Evaluator(
                open_client(settings.environment, generator.engine, tokenizer, generator.lanes, judges),
                grader,
                _protocol(config),
                settings.seed,
                generator.batch_size,
                calls_at_once=generator.calls_at_once,
                second_grade=False,
            )
            at_once = max(generator.batch_size // config.num_samples, 1)
            cells = (
                (Suite(_SUITE, waiting[start : start + at_once]), _DECODING)
                for start in range(0, len(waiting), at_once)
            )
            first = _next_number(context.out / _SHARDS)
            for number, records in enumerate(evaluator.evaluate(cells, progress.add), first):
                _write_shard(context.out / _SHARDS / f"{number:06d}.json", records)
    finally:
        generator.engine.close()


def _protocol(config: DifficultyConfig) -> EvaluationConfig:
    """The evaluation protocol that measures pass rates."""
    assert config.temperature is not None
    assert config.max_response_tokens is not None
    decoding = DecodingConfig(temperature=config.temperature, num_samples=config.num_samples)
    return EvaluationConfig(
        decodings={_DECODING: decoding}, max_response_tokens=config.max_response_tokens, stop=config.stop or ()
    )


def _longest(lengths: Sequence[int], model: Path, config: DifficultyConfig) -> int:
    """Tokens of the longest prompt with a full response; DataError when that exceeds the model's context."""
    assert config.max_response_tokens is not None
    longest, room = max(lengths) + config.max_response_tokens, context_length(read_shape(model))
    if room is not None and longest > room:
        too_long = sum(length + config.max_response_tokens > room for length in lengths)
        raise DataError(
            f"difficulty: {too_long} of {len(lengths)} prompts do not fit: the longest has {max(lengths)} tokens, and "
            f"the model's context of {room} less {config.max_response_tokens} for the response leaves "
            f"{room - config.max_response_tokens}; lower data.max_prompt_tokens or difficulty.max_response_tokens"
        )
    return longest


def _write_shard(path: Path, records: Sequence[SampleRecord]) -> None:
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
        num_truncated=sum(record.finish_reason in _CUT for record in records),
    )


def _finished(shards: Path) -> Iterator[tuple[str, PassRate]]:
    for path in _shards(shards):
        for fields in json.loads(path.read_text(encoding="utf-8")):
            yield fields["uid"], PassRate(**fields)


def _shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("??????.json"))


def _next_number(shards: Path) -> int:
    return max((int(path.stem) + 1 for path in _shards(shards)), default=0)


def _refuse_empty(rates: Sequence[PassRate], fits: Sequence[Fit], config: DifficultyConfig) -> None:
    if Fit.KEPT in fits:
        return
    values = [rate.value for rate in rates]
    raise DataError(
        f"difficulty: no prompt is left of {len(rates)}: {fits.count(Fit.TOO_HARD)} pass rates are below "
        f"difficulty.min_pass_rate {config.min_pass_rate:g}, {fits.count(Fit.TOO_EASY)} above "
        f"difficulty.max_pass_rate {config.max_pass_rate:g} (they range from {min(values):g} to {max(values):g}); "
        "widen the range"
    )


def _metrics(card: DifficultyCard) -> dict[str, float]:
    fits = {f"prompts/{name}": float(count) for name, count in card.fits.items()}
    return {**fits, "pass_rate": card.mean_pass_rate, "truncated_share": card.truncated_share}


if __name__ == "__main__":
    main("difficulty", run)

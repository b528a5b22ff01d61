"""Prepares the data: load sources, tokenise, grade traces, filter, split, write parquet files and a data card.

    python -m luffy.stages.prepare_data --config DIR/config.yaml --out DIR

Writes train.parquet, sft.parquet, rl_complement.parquet, validation.parquet (with `data.validation_prompts`),
corpus.parquet (with `data.corpus`), suites/<name>.parquet, tokenizer/, card.json, card.md and quarantine.jsonl.

Rows are processed in shards (`luffy.data.shards`); a killed stage continues after the finished ones.
"""

import itertools
import json
import logging
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pyarrow.parquet as pq
from transformers import PreTrainedTokenizerBase

from luffy.config.data import MixtureSource, SourceConfig, VerifiersSource
from luffy.config.environment import ANSWER, history_of
from luffy.config.settings import PrepareDataSettings
from luffy.config.shipped import DATA
from luffy.data.card import DataCard, SourceCard, card_json, card_markdown, source_card
from luffy.data.conversations import ConversationEncoder
from luffy.data.overlap import BenchmarkIndex
from luffy.data.parquet import iterate_prompts
from luffy.data.row_filters import FAILS, TEXT_ALONE, Rejection, RowFilter, Rules, check_golds, remedies
from luffy.data.selection import Mask, PassedRows, choose_for_sft, hold_out, merged, read_passed_rows, select
from luffy.data.shards import (
    ALL_REJECTED,
    MAX_SAMPLES,
    OWN_SYSTEM,
    FilterJob,
    ShardStatistics,
    filter_source,
    finished_shards,
    read_statistics,
)
from luffy.data.sources import TraceSource, open_source
from luffy.data.splits import COMPLEMENT, EMPTY_COMPLEMENT, SFT, TRAIN, VALIDATION, PassedPrompts, given_traces
from luffy.data.tokenizer import adapt_tokenizer, build_tokenizer, texts_of
from luffy.environments.registry import check_template, instructions_by_source, open_scored
from luffy.errors import DataError
from luffy.files import write_atomic
from luffy.grading.pool import JUDGE_CACHE, GraderPool
from luffy.library_loading import without_collections
from luffy.pipeline.manifest import hash_file
from luffy.stages.program import StageContext, StageResult, main
from luffy.types import Prompt

logger = logging.getLogger(__name__)

_SUITES = "suites."
_CORPUS = "corpus"
_SHARDS = "shards"
_GOLDS_AT_ONCE = 1024
_MEANINGS = {FAILS: "are not graded correct as answers", TEXT_ALONE: "can only be matched by their exact text"}
_MAX_UIDS_LOGGED = 5


# Rows have no reference cycles, and the collector's scans would take a quarter of the time.
@without_collections(freeze=False)
def run(settings: PrepareDataSettings, context: StageContext) -> StageResult:
    """Prepare all sources; DataError when one has no rows left."""
    data, out = settings.data, context.out
    configs: dict[str, SourceConfig | MixtureSource | None] = {"train": data.train, "corpus": data.corpus}
    configs |= {f"{_SUITES}{name}": source for name, source in data.suites.items()}
    given = {name: config for name, config in configs.items() if config is not None}
    sources = {name: open_source(config, name, settings.seed) for name, config in given.items()}
    # Those in which equal prompts may be different tasks.
    many_tasks = {name for name, each in given.items() if isinstance(each, VerifiersSource) and each.equal_prompts}
    steps = itertools.count(1)

    def step_done() -> None:
        context.events.progress(next(steps), 2 + len(sources))

    tokenizer, environment = _tokenizer(settings, sources), settings.environment
    tokenizer.save_pretrained(out / "tokenizer")
    instructions: Mapping[str | None, str] = {}
    if environment is not None:  # raises where this chat template does not support it
        open_scored(environment)
        check_template(environment, ConversationEncoder(tokenizer, history_of(environment)))
        instructions = instructions_by_source(environment)
    step_done()
    others = {  # benchmarks that are not suites of the experiment
        name: open_source(other, f"decontamination.benchmarks.{name}", settings.seed)
        for name, other in data.decontamination.benchmarks.items()
    }
    # Training data must not contain a problem of any benchmark.
    benchmarks = BenchmarkIndex()
    suites = {
        name.removeprefix(_SUITES): sources[name] for name in sources if _is_suite(name) and name not in many_tasks
    }
    checked = {name: benchmarks.add(name, _prompts(source)) for name, source in [*suites.items(), *others.items()]}
    benchmarks.finish()
    inputs = json.dumps([{name: source.inputs() for name, source in each.items()} for each in (sources, others)])
    step_done()

    cards: list[SourceCard] = []
    files: list[str] = []
    malformed: list[dict[str, object]] = []
    rejected: list[dict[str, object]] = []
    judge_cache = out / JUDGE_CACHE
    with GraderPool.configured(context.execution, settings.grading, judge_cache) as grader:
        for name, source in sources.items():
            rules = _rules(name, settings, may_repeat=name == _CORPUS or name in many_tasks)
            job = FilterJob(
                name=name,
                filter=RowFilter(tokenizer, rules, benchmarks),
                remove_system=data.remove_system,
                system_prompt=data.system_prompt,
                instructions={} if name == _CORPUS else instructions,
                grading=settings.grading,
                judge_cache=judge_cache,
                inputs=inputs,
            )
            workers = context.execution.data_workers or len(os.sched_getaffinity(0))
            filter_source(source, job, out / _SHARDS / name, workers, grader)
            statistics = ShardStatistics()
            for shard in finished_shards(out / _SHARDS / name):
                statistics += read_statistics(shard)
            card, made = _finished(name, source, statistics, rules, settings, out, grader)
            cards.append(card)
            files += made
            malformed += [{"source": name, **row} for row in statistics.quarantined]
            shown: Counter[str] = Counter()
            for sample in () if _is_suite(name) else statistics.samples:
                shown[str(sample["reason"])] += 1
                if shown[str(sample["reason"])] <= MAX_SAMPLES:
                    rejected.append({"source": name, **sample})
            step_done()
    write_atomic(out / "quarantine.jsonl", "".join(json.dumps(line) + "\n" for line in [*malformed, *rejected]))
    return _result(out, len(tokenizer), cards, files, checked)


def _result(
    out: Path, vocabulary_size: int, cards: Sequence[SourceCard], files: Sequence[str], checked: Mapping[str, int]
) -> StageResult:
    """Write the card; `checked` has the rows of each benchmark that training data was compared with."""
    written: dict[str, Mapping[str, object]] = {
        file: {
            "rows": pq.read_metadata(out / file).num_rows,
            "bytes": (out / file).stat().st_size,
            "sha256": hash_file(out / file),
        }
        for file in files
    }
    shipped = sorted(file.stem for file in (DATA / "benchmarks").glob("*.yaml"))
    not_checked = [name for name in shipped if name not in checked]
    whole = DataCard(vocabulary_size, cards, checked, not_checked, written)
    write_atomic(out / "card.json", card_json(whole))
    write_atomic(out / "card.md", card_markdown(whole))
    outputs = (*files, "quarantine.jsonl", "tokenizer", "card.json", "card.md")
    metrics = {f"rows/{card.name}": float(card.rows_out) for card in cards}
    metrics["rejected"] = float(sum(sum(card.rejected.values()) for card in cards))
    metrics["folded"] = float(sum(card.folded for card in cards))
    metrics["quarantined"] = float(sum(card.quarantined for card in cards))
    metrics["vocabulary_size"] = float(vocabulary_size)
    return StageResult(outputs, metrics, scratch=(_SHARDS,))


def _is_suite(name: str) -> bool:
    return name.startswith(_SUITES)


def _prompts(source: TraceSource) -> Iterator[Prompt]:
    return (row for row in source.rows() if isinstance(row, Prompt))


def _tokenizer(settings: PrepareDataSettings, sources: Mapping[str, TraceSource]) -> PreTrainedTokenizerBase:
    if settings.model_path is not None:
        return adapt_tokenizer(settings.model_path, settings.chat_template, template_date=settings.template_date)
    environment = settings.environment
    instructions = instructions_by_source(environment).values() if environment else ()
    system = [settings.data.system_prompt or "", *(instructions or ("",))]
    texts = (text for source in sources.values() for text in texts_of(_prompts(source)))
    return build_tokenizer(itertools.chain(system, texts))


def _rules(name: str, settings: PrepareDataSettings, *, may_repeat: bool) -> Rules:
    data, environment = settings.data, settings.environment
    is_train = name == "train"
    is_answered = environment is None or ANSWER in environment.scoring.weights
    return Rules(
        # Without its long problems a suite would be a different benchmark under the same name.
        max_prompt_tokens=None if _is_suite(name) else data.max_prompt_tokens,
        max_trace_tokens=data.max_trace_tokens,
        require_verified_traces=data.require_verified_traces,
        repeats="allow" if may_repeat else data.filters.repeats if is_train else "fold",
        unique_problems=is_train,
        near_duplicates=data.filters.near_duplicates if is_train else None,
        keeps_traces=not _is_suite(name),
        history=history_of(environment),
        requires_gold=settings.grading if is_train and is_answered else None,
    )


def _finished(
    name: str,
    source: TraceSource,
    statistics: ShardStatistics,
    rules: Rules,
    settings: PrepareDataSettings,
    out: Path,
    grader: GraderPool,
) -> tuple[SourceCard, list[str]]:
    """Write the files of a source whose shards are finished; DataError when no rows are left."""
    folder = out / _SHARDS / name
    rows = read_passed_rows(folder)
    selection, prompts = select(rows, rules), PassedPrompts(folder)
    if rules.repeats == "merge":
        prompts = PassedPrompts(folder, given_traces(folder, rows, selection))
        rows = merged(rows, selection)
    kept = selection.kept
    if not kept.any():
        rejected = statistics.rejected + selection.rejected
        counts = sorted(rejected.items(), key=lambda item: (-item[1], item[0]))
        reasons = ", ".join(f"{count} {reason}" for reason, count in counts)
        quarantined = f"; {statistics.malformed.total()} malformed" if statistics.malformed else ""
        raise DataError(
            f"data.{name}: no row is left of {statistics.rows_in}: rejected {reasons}{quarantined}; "
            f"{'; '.join(remedies(rejected, statistics.longest))}"
        )
    if name == "train":
        files = _write_splits(out, prompts, rows, kept, settings)
    else:
        files = [f"{name.replace('.', '/', 1)}.parquet"]
        (out / files[0]).parent.mkdir(exist_ok=True)
        prompts.write(out / files[0], kept)
    asked = iterate_prompts(out / files[0]) if _is_suite(name) else iter(())
    while chunk := list(itertools.islice(asked, _GOLDS_AT_ONCE)):
        for prompt, gold in zip(chunk, check_golds(chunk, grader, settings.grading), strict=True):
            statistics.add_gold(prompt.uid, gold)
    for finding, meaning in _MEANINGS.items():
        if uids := [str(each["uid"]) for each in statistics.gold_findings if each["finding"] == finding]:
            shown = ", ".join(uids[:_MAX_UIDS_LOGGED]) + (", ..." if len(uids) > _MAX_UIDS_LOGGED else "")
            done = ""
            if finding == FAILS and not _is_suite(name):
                done = f"; their rows are rejected: {remedies([Rejection.REFERENCE_FAILS], {})[0]}"
            logger.warning(
                "%s: %d reference answers %s: %s (all in card.json)%s", name, len(uids), meaning, shown, done
            )
    lengths = rows.prompt_tokens[kept], rows.lengths_of_traces(kept)
    unread: Mapping[str, int] = getattr(source, "unread", {})
    if unread:
        named = ", ".join(f"{column} ({count})" for column, count in unread.items())
        logger.warning("%s: columns that are not read, with how many of its first rows have a value: %s", name, named)
    card = source_card(name, source.kind, source.inputs(), statistics, selection, unread, lengths)
    logger.info("%s: %d of %d rows", name, card.rows_out, card.rows_in)
    if own := statistics.remarks[OWN_SYSTEM]:
        logger.warning("%s: %d rows keep their own system prompt; data.system_prompt is not added to them", name, own)
    if lost := statistics.remarks[ALL_REJECTED]:
        reasons = ", ".join(f"{count} {reason}" for reason, count in card.rejected_traces.items())
        logger.warning(
            "%s: %d rows lost all their traces and stay without one; rejected traces: %s; %s",
            *(name, lost, reasons, "; ".join(remedies(card.rejected_traces, statistics.longest))),
        )
    return card, files


def _write_splits(
    out: Path, prompts: PassedPrompts, rows: PassedRows, kept: Mask, settings: PrepareDataSettings
) -> list[str]:
    """Split the training rows: validation, RL, SFT, and RL after SFT."""
    data, seed = settings.data, settings.seed
    held_out = hold_out(rows, kept, data.validation_prompts, seed)
    training = kept & ~held_out
    sft = choose_for_sft(rows, training, data, seed)
    prompts.write(out / TRAIN, training)
    needs_care = data.sft.correct_only and not rows.all_verified[sft].all()
    (prompts.write_correct if needs_care else prompts.write)(out / SFT, sft)
    if not prompts.write_bare(out / COMPLEMENT, training & ~sft) and data.rl == "complement":
        raise DataError(EMPTY_COMPLEMENT)
    if not data.validation_prompts:
        return [TRAIN, SFT, COMPLEMENT]
    prompts.write(out / VALIDATION, held_out)
    return [TRAIN, SFT, COMPLEMENT, VALIDATION]


if __name__ == "__main__":
    main("prepare_data", run)

"""One checkpoint over all suites and decodings: graded responses, and accuracies with intervals.

Run: python -m luffy.stages.evaluate --config DIR/config.yaml --out DIR

Writes samples.jsonl and results.json. Each finished pair of suite and decoding is kept in parts/, so that a killed
evaluation goes on with the next one.
"""

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

from transformers import PreTrainedTokenizerBase

from luffy.config.settings import EvaluateSettings
from luffy.data.parquet import read_prompts
from luffy.data.templates import load_tokenizer, render_prompts
from luffy.errors import DataError
from luffy.evaluation.protocol import Evaluator, Suite, check_suite
from luffy.evaluation.results import (
    RESULTS_FILE,
    SAMPLES_FILE,
    EvaluationResults,
    ResultRow,
    join_sample_records,
    read_sample_records,
    result_row,
    write_results,
    write_sample_records,
)
from luffy.grading import JUDGE_CACHE, GraderPool
from luffy.stages.program import StageContext, StageResult, main
from luffy.stages.responses import ResponseProgress, open_generator

logger = logging.getLogger(__name__)
_PARTS = "parts"
_NODE_PREFIX = "evaluate_"


def run(settings: EvaluateSettings, context: StageContext) -> StageResult:
    """Evaluate the upstream model by the protocol that every checkpoint of the chain shares."""
    config, model = settings.evaluation, context.inputs["model"] / "model"
    tokenizer = load_tokenizer(model)
    suites = read_suites(context.inputs["data"])
    for suite in suites:
        check_suite(suite, tokenizer, config.max_response_tokens, _context_length(model))
    cells = [(suite, decoding) for decoding in config.decodings for suite in suites]
    (context.out / _PARTS).mkdir(exist_ok=True)
    waiting = [(suite, decoding) for suite, decoding in cells if not _part(context, suite, decoding).exists()]
    total, left = _num_responses(cells, settings), _num_responses(waiting, settings)
    if waiting:
        longest = max(_longest_prompt(suite, tokenizer) for suite in suites) + config.max_response_tokens
        _evaluate(waiting, settings, context, longest, ResponseProgress(context, total, done=total - left))
    parts = [_part(context, suite, decoding) for suite, decoding in cells]
    rows = tuple(result_row(list(read_sample_records(part)), config.confidence) for part in parts)
    join_sample_records(context.out / SAMPLES_FILE, parts)
    checkpoint = context.node.removeprefix(_NODE_PREFIX)
    write_results(
        context.out / RESULTS_FILE,
        EvaluationResults(checkpoint=checkpoint, confidence=config.confidence, rows=rows),
    )
    return StageResult((SAMPLES_FILE, RESULTS_FILE), _headline(rows), resumed_from=total - left)


def read_suites(data: Path) -> list[Suite]:
    """The prepared suites, in the order of the configuration (which the data card keeps); DataError without any."""
    files = {path.stem: path for path in sorted((data / "suites").glob("*.parquet"))}
    card = data / "card.json"
    sources = json.loads(card.read_text(encoding="utf-8"))["sources"] if card.exists() else {}
    order = [name.removeprefix("suites.") for name in sources]
    if not files:
        raise DataError(f"{data / 'suites'}: no suite to evaluate; give at least one in data.suites")
    names = sorted(files, key=lambda name: (order.index(name) if name in order else len(order), name))
    return [Suite(name, read_prompts(files[name])) for name in names]


def _evaluate(
    cells: Sequence[tuple[Suite, str]],
    settings: EvaluateSettings,
    context: StageContext,
    longest: int,
    progress: ResponseProgress,
) -> None:
    """Fill in the missing parts; no prompt with its response has more than `longest` tokens."""
    model, execution = context.inputs["model"] / "model", context.execution
    generator = open_generator(settings.evaluation.engine, model, settings.dtype, execution, longest)
    try:
        own = tuple(settings.evaluation.graders.values())
        cache = context.out / JUDGE_CACHE
        with GraderPool.configured(execution.grader_workers, settings.grading, cache, own) as grader:
            evaluator = Evaluator(
                generator.engine,
                grader,
                load_tokenizer(model),
                settings.evaluation,
                settings.seed,
                generator.batch_size,
            )
            for suite, decoding in cells:
                records = evaluator.evaluate(suite, decoding, progress.add)
                write_sample_records(_part(context, suite, decoding), records)
                logger.info("%s, %s: %d responses", suite.name, decoding, len(records))
    finally:
        generator.engine.close()


def _longest_prompt(suite: Suite, tokenizer: PreTrainedTokenizerBase) -> int:
    return max(len(ids) for ids in render_prompts(tokenizer, [prompt.messages for prompt in suite.prompts]))


def _part(context: StageContext, suite: Suite, decoding: str) -> Path:
    return context.out / _PARTS / f"{quote(decoding, safe='')}@{quote(suite.name, safe='')}.jsonl"


def _num_responses(cells: Sequence[tuple[Suite, str]], settings: EvaluateSettings) -> int:
    return sum(len(suite.prompts) * settings.evaluation.decodings[name].num_samples for suite, name in cells)


def _context_length(model: Path) -> int | None:
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    return config.get("max_position_embeddings")


def _headline(rows: Sequence[ResultRow]) -> dict[str, float]:
    return {f"accuracy/{row.decoding}/{row.suite}": row.accuracy for row in rows}


if __name__ == "__main__":
    main("evaluate", run)

"""One checkpoint over all suites and decodings: graded responses, and accuracies with intervals.

Run: python -m luffy.stages.evaluate --config DIR/config.yaml --out DIR

Writes samples.jsonl, results.json and summary.md. Each batch of graded responses is kept in parts/ before the next one
is waited for, so that a killed evaluation goes on with the batch it was at, to the same bytes. What a model behind an
endpoint answers is kept response by response.
"""

import json
import logging
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from urllib.parse import quote

from luffy.config.model import EndpointModel
from luffy.config.settings import EvaluateSettings
from luffy.data.parquet import read_prompts
from luffy.data.templates import load_tokenizer
from luffy.errors import DataError
from luffy.evaluation.protocol import Evaluator, Suite, check_problems, check_suite, protocol_of
from luffy.evaluation.respondents import TextRespondent, TokenRespondent, ask_by_text
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
from luffy.evaluation.sample_log import SampleLog
from luffy.evaluation.summary import SUMMARY_FILE, render_summary
from luffy.files import write_atomic
from luffy.grading import JUDGE_CACHE, GraderPool
from luffy.rollout.engine import SwappableEngine
from luffy.rollout.text_answers import TextAnswers
from luffy.rollout.text_endpoint import TextEndpoint, read_endpoint
from luffy.stages.program import StageContext, StageResult, main
from luffy.stages.responses import ResponseProgress, open_endpoint, open_generator

logger = logging.getLogger(__name__)
_PARTS = "parts"
_ANSWERS = "answers.jsonl"
"""What an endpoint has said, until all of it is graded."""
_OPEN = "open"
"""Below it the part that is being generated."""
OUTPUTS = (SAMPLES_FILE, RESULTS_FILE, SUMMARY_FILE)
_NODE_PREFIX = "evaluate_"

Asked = tuple[Suite, str]
"""A suite under the decoding of that name."""


def run(settings: EvaluateSettings, context: StageContext) -> StageResult:
    """Evaluate the upstream model by the protocol that every checkpoint of the chain shares."""
    model = context.inputs["model"] / "model"
    endpoint = read_endpoint(model)
    opened: AbstractContextManager[tuple[Evaluator, object]]
    if endpoint is not None:
        cells = _cells_of_endpoint(settings, context.inputs["data"])
        opened = _open_endpoint(endpoint, cells, settings, context)
    else:
        cells, longest = read_cells(settings, context.inputs["data"], model)
        opened = open_evaluator(model, settings, context, longest)
    waiting = waiting_cells(cells, context.out)
    total, left = num_responses(cells, settings), num_responses(waiting, settings)
    progress = ResponseProgress(context, total, done=total - left)
    if waiting:
        with opened as (evaluator, _):
            fill_parts(evaluator, waiting, context.out, progress)
    rows = write_cells(cells, settings, context.out, context.node.removeprefix(_NODE_PREFIX))
    return StageResult(OUTPUTS, _headline(rows), total - progress.graded)


def read_cells(settings: EvaluateSettings, data: Path, model: Path) -> tuple[list[Asked], int]:
    """All that is asked of a model, and the most tokens that a prompt and its response have together.

    Raises DataError for a suite that could not be evaluated whole.
    """
    config, tokenizer = settings.evaluation, load_tokenizer(model)
    suites = read_suites(data)
    longest = config.max_response_tokens + max(
        check_suite(
            suite, tokenizer, config.max_response_tokens, _context_length(model), config.template_of(suite.name)
        )
        for suite in suites
    )
    return [(suite, decoding) for decoding in config.decodings for suite in suites], longest


def waiting_cells(cells: Sequence[Asked], out: Path) -> list[Asked]:
    """Those that have no finished part in `out`, which is made ready for them."""
    (out / _PARTS / _OPEN).mkdir(parents=True, exist_ok=True)
    return [(suite, decoding) for suite, decoding in cells if not _part(out, suite, decoding).exists()]


def write_cells(
    cells: Sequence[Asked], settings: EvaluateSettings, out: Path, checkpoint: str
) -> tuple[ResultRow, ...]:
    """Write what the finished parts in `out` come to: `OUTPUTS`."""
    config, parts = settings.evaluation, [_part(out, suite, decoding) for suite, decoding in cells]
    rows = tuple(
        result_row(list(read_sample_records(part)), config.confidence, protocol_of(config, suite.name, decoding))
        for part, (suite, decoding) in zip(parts, cells, strict=True)
    )
    join_sample_records(out / SAMPLES_FILE, parts)
    results = EvaluationResults(checkpoint=checkpoint, confidence=config.confidence, rows=rows)
    write_results(out / RESULTS_FILE, results)
    write_atomic(out / SUMMARY_FILE, render_summary(results))
    return rows


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


@contextmanager
def open_evaluator(
    model: Path, settings: EvaluateSettings, context: StageContext, longest: int
) -> Iterator[tuple[Evaluator, SwappableEngine]]:
    """What evaluates the model in the folder `model`, and the engine behind it.

    No prompt with its response has more than `longest` tokens.
    """
    generator = open_generator(settings.evaluation.engine, model, settings.dtype, context.execution, longest)
    try:
        with _graders(settings, context) as grader:
            respondent = TokenRespondent(generator.engine, load_tokenizer(model))
            evaluator = Evaluator(respondent, grader, settings.evaluation, settings.seed, generator.batch_size)
            yield evaluator, generator.engine
    finally:
        generator.engine.close()


def _cells_of_endpoint(settings: EvaluateSettings, data: Path) -> list[Asked]:
    """As `read_cells`, of a model whose tokens and context nobody here knows."""
    suites = read_suites(data)
    for suite in suites:
        check_problems(suite, partial(ask_by_text, template=settings.evaluation.template_of(suite.name)))
    return [(suite, decoding) for decoding in settings.evaluation.decodings for suite in suites]


@contextmanager
def _open_endpoint(
    model: EndpointModel, cells: Sequence[Asked], settings: EvaluateSettings, context: StageContext
) -> Iterator[tuple[Evaluator, TextEndpoint]]:
    """What evaluates a model that others serve. What they have answered is forgotten once all of it is graded."""
    templates = [settings.evaluation.template_of(suite.name) for suite, _ in cells]
    answers = TextAnswers(context.out / _ANSWERS)
    try:
        generator = open_endpoint(model, templates, context.execution, answers)
        try:
            with _graders(settings, context) as grader:
                respondent = TextRespondent(generator.endpoint)
                evaluator = Evaluator(respondent, grader, settings.evaluation, settings.seed, generator.batch_size)
                yield evaluator, generator.endpoint
        finally:
            generator.endpoint.close()
    except BaseException:
        answers.close()
        raise
    answers.remove()


def _graders(settings: EvaluateSettings, context: StageContext) -> GraderPool:
    own = settings.evaluation.own_graders
    return GraderPool.configured(context.execution.grader_workers, settings.grading, context.out / JUDGE_CACHE, own)


def fill_parts(evaluator: Evaluator, cells: Sequence[Asked], out: Path, progress: ResponseProgress) -> None:
    """Ask what `cells` want and keep the graded responses in `out`."""
    for suite, decoding in cells:
        part = _part(out, suite, decoding)
        log = SampleLog(part.parent / _OPEN / part.name, progress.skip)
        records = evaluator.evaluate(suite, decoding, progress.add, log)
        write_sample_records(part, records)
        log.remove()
        logger.info("%s, %s: %d responses", suite.name, decoding, len(records))


def _part(out: Path, suite: Suite, decoding: str) -> Path:
    return out / _PARTS / f"{quote(decoding, safe='')}@{quote(suite.name, safe='')}.jsonl"


def num_responses(cells: Sequence[Asked], settings: EvaluateSettings) -> int:
    """Responses that `cells` ask of one model."""
    return sum(len(suite.prompts) * settings.evaluation.protocol(suite.name, name).num_samples for suite, name in cells)


def _context_length(model: Path) -> int | None:
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    return config.get("max_position_embeddings")


def _headline(rows: Sequence[ResultRow]) -> dict[str, float]:
    return {f"accuracy/{row.decoding}/{row.suite}": row.accuracy for row in rows}


if __name__ == "__main__":
    main("evaluate", run)

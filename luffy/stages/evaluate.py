"""One checkpoint over all suites and decodings: graded responses, and accuracies with intervals.

Run: python -m luffy.stages.evaluate --config DIR/config.yaml --out DIR

Writes samples.jsonl.zst, responses.json, results.json, summary.md and summary.html (with plots). Each batch of graded
responses is kept in parts/ before the next one is waited for, so that a killed evaluation goes on with the batch it was
at, to the same bytes; parts/ is removed once samples.jsonl.zst is there. What an earlier evaluation has drawn of the
same model in the same way is not drawn again, but graded anew (`luffy.stages.adoption`). What a model behind an
endpoint answers is kept response by response.
"""

import json
import logging
import shutil
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
from luffy.evaluation.evaluator import Evaluator, check_problems, check_suite, protocol_of
from luffy.evaluation.model_clients import TextRespondent, TokenRespondent, ask_by_ids, ask_by_text
from luffy.evaluation.requests import Ask, Suite
from luffy.evaluation.results import RESULTS_FILE, EvaluationResults, ResultRow, tally_cells, write_results
from luffy.evaluation.sample_files import SAMPLES_FILE, join_sample_records, read_sample_records, write_sample_records
from luffy.evaluation.sample_log import SampleLog
from luffy.grading import JUDGE_CACHE, GraderPool
from luffy.pages.evaluation_page import PAGE_FILE, write_summaries
from luffy.pages.evaluation_tables import SUMMARY_FILE
from luffy.rollout.engine import SwappableEngine
from luffy.rollout.text_answers import TextAnswers
from luffy.rollout.text_endpoint import TextEndpoint, read_endpoint
from luffy.stages.adoption import RESPONSES_FILE, Inquiries, adopt, find_drawn, write_digests
from luffy.stages.program import StageContext, StageResult, main
from luffy.stages.responses import ResponseProgress, open_endpoint, open_generator

logger = logging.getLogger(__name__)
_PARTS = "parts"
_ANSWERS = "answers.jsonl"
"""What an endpoint has said, until all of it is graded."""
_OPEN = "open"
"""Below it the part that is being generated."""
OUTPUTS = (SAMPLES_FILE, RESPONSES_FILE, RESULTS_FILE, SUMMARY_FILE, PAGE_FILE)
_NODE_PREFIX = "evaluate_"

Asked = tuple[Suite, str]
"""A suite under the decoding of that name."""


def run(settings: EvaluateSettings, context: StageContext) -> StageResult:
    """Evaluate the upstream model by the protocol that every checkpoint of the chain shares."""
    model = context.inputs["model"] / "model"
    endpoint = read_endpoint(model)
    ask: Ask
    opened: AbstractContextManager[tuple[Evaluator, object]]
    if endpoint is not None:
        cells, ask = _cells_of_endpoint(settings, context.inputs["data"]), ask_by_text
        opened = _open_endpoint(endpoint, cells, settings, context)
    else:
        cells, longest = read_cells(settings, context.inputs["data"], model)
        ask = ask_by_ids(load_tokenizer(model))
        opened = open_evaluator(model, settings, context, longest)
    waiting = waiting_cells(cells, context.out)
    total, left = num_responses(cells, settings), num_responses(waiting, settings)
    progress = ResponseProgress(context, total, done=total - left)
    inquiries = Inquiries(cells, settings, ask, context.inputs["model"])
    waiting = adopt_parts(waiting, inquiries, settings, context, context.out, progress)
    if waiting:
        with opened as (evaluator, _):
            fill_parts(evaluator, waiting, context.out, progress)
    write_digests(context.out, inquiries.digests)
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
    for leftover in (path for name in OUTPUTS for path in out.glob(f".{name}.*")):
        leftover.unlink()  # a kill while it was written; it may be as large as all responses
    if (out / SAMPLES_FILE).exists():  # all parts were in it, and may be gone
        return []
    (out / _PARTS / _OPEN).mkdir(parents=True, exist_ok=True)
    return [(suite, decoding) for suite, decoding in cells if not _part(out, suite, decoding).exists()]


def write_cells(
    cells: Sequence[Asked], settings: EvaluateSettings, out: Path, checkpoint: str
) -> tuple[ResultRow, ...]:
    """Write what the finished parts in `out` come to: `OUTPUTS`."""
    config, samples = settings.evaluation, out / SAMPLES_FILE
    if not samples.exists():
        join_sample_records(samples, [_part(out, suite, decoding) for suite, decoding in cells])
    # Whole and durable now: a kill from here on finds it.
    shutil.rmtree(out / _PARTS, ignore_errors=True)
    tallies = tally_cells(read_sample_records(samples))
    rows = tuple(
        tallies[suite.name, decoding].row(config.confidence, protocol_of(config, suite.name, decoding))
        for suite, decoding in cells
    )
    results = EvaluationResults(checkpoint=checkpoint, confidence=config.confidence, rows=rows)
    write_results(out / RESULTS_FILE, results)
    write_summaries(out, results)
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
        with open_grader(settings, context) as grader:
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
            with open_grader(settings, context) as grader:
                respondent = TextRespondent(generator.endpoint)
                evaluator = Evaluator(respondent, grader, settings.evaluation, settings.seed, generator.batch_size)
                yield evaluator, generator.endpoint
        finally:
            generator.endpoint.close()
    except BaseException:
        answers.close()
        raise
    answers.remove()


@contextmanager
def open_grader(settings: EvaluateSettings, context: StageContext) -> Iterator[GraderPool]:
    """The graders that the settings ask for."""
    own, cache = settings.evaluation.own_graders, context.out / JUDGE_CACHE
    with GraderPool.configured(context.execution.grader_workers, settings.grading, cache, own) as grader:
        yield grader


def adopt_parts(
    waiting: Sequence[Asked],
    inquiries: Inquiries,
    settings: EvaluateSettings,
    context: StageContext,
    out: Path,
    progress: ResponseProgress,
) -> list[Asked]:
    """Fill those parts in `out` whose responses an earlier evaluation has drawn; returns the cells that are left."""
    names = {(suite.name, decoding): (suite, decoding) for suite, decoding in waiting}
    found = find_drawn(context.out, {cell: inquiries.digests[cell] for cell in names if cell in inquiries.digests})
    # What this evaluation has begun itself goes on as it began.
    begun = {cell for cell, asked in names.items() if _log_file(out, *asked).exists()}
    found = {folder: [cell for cell in cells if cell not in begun] for folder, cells in found.items()}
    for folder, cells in found.items():
        parts = {cell: _part(out, *names[cell]) for cell in cells}
        with open_grader(settings, context) as grader:
            for cell in adopt(folder, parts, inquiries, grader, progress.add_adopted):
                context.events.message(f"{', '.join(cell)}: responses of {folder.name}, graded anew")
                del names[cell]
    return list(names.values())


def fill_parts(evaluator: Evaluator, cells: Sequence[Asked], out: Path, progress: ResponseProgress) -> None:
    """Ask what `cells` want and keep the graded responses in `out`."""
    for suite, decoding in cells:
        part = _part(out, suite, decoding)
        log = SampleLog(_log_file(out, suite, decoding), progress.skip)
        write_sample_records(part, evaluator.evaluate_into(log, suite, decoding, progress.add))
        log.remove()
        logger.info("%s, %s is done", suite.name, decoding)


def _part(out: Path, suite: Suite, decoding: str) -> Path:
    return out / _PARTS / f"{quote(decoding, safe='')}@{quote(suite.name, safe='')}.jsonl.zst"


def _log_file(out: Path, suite: Suite, decoding: str) -> Path:
    part = _part(out, suite, decoding)
    return part.parent / _OPEN / part.stem


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

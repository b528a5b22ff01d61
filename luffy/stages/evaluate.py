"""Evaluates a model on all suites and decodings: graded responses, and accuracies with confidence intervals.

Run: python -m luffy.stages.evaluate --config DIR/config.yaml --out DIR

Writes samples.jsonl.zst, responses.json, results.json, summary.md and summary.html (with plots). Each batch of graded
responses is saved in parts/, so a killed evaluation continues with the batch it was at and ends with the same bytes;
parts/ is removed once samples.jsonl.zst is complete. Responses that an earlier evaluation sampled from the same model
in the same way are reused and only graded again (`luffy.stages.adoption`). Responses of an endpoint are saved one by
one.
"""

import logging
import shutil
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from functools import partial
from pathlib import Path
from urllib.parse import quote

from luffy.config.environment import EpisodeLimits
from luffy.config.model import EndpointModel
from luffy.config.settings import EvaluateSettings
from luffy.data.parquet import read_prompts, suite_files
from luffy.data.templates import load_tokenizer
from luffy.errors import DataError
from luffy.evaluation.episode_client import open_client, open_text_client
from luffy.evaluation.evaluator import Evaluator, protocol_of
from luffy.evaluation.model_clients import render_as_ids, render_as_text
from luffy.evaluation.requests import Render, Suite
from luffy.evaluation.results import (
    RESULTS_FILE,
    EvaluationResults,
    ResultRow,
    advice_on,
    tally_cells,
    write_results,
)
from luffy.evaluation.sample_files import SAMPLES_FILE, join_sample_records, read_sample_records, write_sample_records
from luffy.evaluation.sample_log import SampleLog
from luffy.evaluation.suite_checks import check_problems, check_suite
from luffy.grading.judge import Judges
from luffy.grading.pool import JUDGE_CACHE, GraderPool
from luffy.json_text import parse_json
from luffy.report.evaluation_page import PAGE_FILE, SUMMARY_FILE, by_decoding, write_summaries
from luffy.rollout.engine import SwappableEngine
from luffy.rollout.text_answers import TextAnswers
from luffy.rollout.text_endpoint import TextEndpoint, read_endpoint
from luffy.stages.adoption import RESPONSES_FILE, EvaluationRequests, adopt, find_sampled, write_digests
from luffy.stages.program import StageContext, StageResult, main
from luffy.stages.responses import ResponseProgress, open_endpoint, open_generator

logger = logging.getLogger(__name__)
_PARTS = "parts"
_ANSWERS = "answers.jsonl"
"""Responses of an endpoint; deleted once all of them are graded."""
_OPEN = "open"
"""Folder of the part that is being generated."""
OUTPUTS = (SAMPLES_FILE, RESPONSES_FILE, RESULTS_FILE, SUMMARY_FILE, PAGE_FILE)
_NODE_PREFIX = "evaluate_"

SuiteDecoding = tuple[Suite, str]
"""A suite and the name of a decoding."""


def run(settings: EvaluateSettings, context: StageContext) -> StageResult:
    """Evaluate the upstream model with the protocol shared by all checkpoints of the chain."""
    model = context.inputs["model"] / "model"
    endpoint = read_endpoint(model)
    render: Render
    opened: AbstractContextManager[tuple[Evaluator, object]]
    if endpoint is not None:
        cells, render = _cells_of_endpoint(settings, context.inputs["data"]), render_as_text
        opened = _open_endpoint(endpoint, cells, settings, context)
    else:
        cells, longest = read_cells(settings, context.inputs["data"], model)
        render = render_as_ids(load_tokenizer(model))
        opened = open_evaluator(model, settings, context, longest)
    waiting = waiting_cells(cells, context.out)
    total, left = num_responses(cells, settings), num_responses(waiting, settings)
    progress = ResponseProgress(context, total, done=total - left)
    requests = EvaluationRequests(cells, settings, render, context.inputs["model"])
    waiting = adopt_parts(waiting, requests, settings, context, context.out, progress)
    if waiting:
        with opened as (evaluator, _):
            fill_parts(evaluator, waiting, context.out, progress)
    else:
        (context.out / _ANSWERS).unlink(missing_ok=True)  # an earlier attempt may have ended before it deleted them
    write_digests(context.out, requests.digests)
    rows = write_cells(cells, settings, context.out, context.node.removeprefix(_NODE_PREFIX))
    for decoding, found in by_decoding(rows).items():
        if (advice := advice_on(found)) is not None:
            context.events.message(f"{decoding}, {advice}")
    return StageResult(OUTPUTS, _headline(rows), total - progress.graded)


def read_cells(settings: EvaluateSettings, data: Path, model: Path) -> tuple[list[SuiteDecoding], int]:
    """All pairs of suite and decoding, and the largest number of tokens of a prompt with its response.

    Raises DataError for a suite with prompts that do not fit.
    """
    config, tokenizer = settings.evaluation, load_tokenizer(model)
    suites = read_suites(data, config.only)
    longest = config.max_response_tokens + max(
        check_suite(
            suite, tokenizer, config.max_response_tokens, _context_length(model), config.template_of(suite.name)
        )
        for suite in suites
    )
    return [(suite, decoding) for decoding in config.decodings for suite in suites], longest


def waiting_cells(cells: Sequence[SuiteDecoding], out: Path) -> list[SuiteDecoding]:
    """The cells without a finished part in `out`; creates the folder of each part."""
    for leftover in (path for name in OUTPUTS for path in out.glob(f".{name}.*")):
        leftover.unlink()  # left by a kill during writing; it may be as large as all responses
    if (out / SAMPLES_FILE).exists():  # joined from all parts, which may be deleted already
        return []
    (out / _PARTS / _OPEN).mkdir(parents=True, exist_ok=True)
    return [(suite, decoding) for suite, decoding in cells if not _part(out, suite, decoding).exists()]


def write_cells(
    cells: Sequence[SuiteDecoding], settings: EvaluateSettings, out: Path, checkpoint: str
) -> tuple[ResultRow, ...]:
    """Write `OUTPUTS` from the finished parts in `out`."""
    config, samples = settings.evaluation, out / SAMPLES_FILE
    if not samples.exists():
        join_sample_records(samples, [_part(out, suite, decoding) for suite, decoding in cells])
    # samples.jsonl.zst is complete and on disk; the parts are no longer needed.
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


def read_suites(data: Path, only: Sequence[str] | None = None) -> list[Suite]:
    """The prepared suites, or `only` some of them; DataError if there are none.

    They come in the order of the configuration, which the data card keeps; `validation` comes last.
    """
    files = suite_files(data, only)
    card = data / "card.json"
    sources = parse_json(card.read_text(encoding="utf-8"))["sources"] if card.exists() else {}
    order = [name.removeprefix("suites.") for name in sources]
    if not files:
        raise DataError(f"{data / 'suites'}: no suite to evaluate; give at least one in data.suites")
    names = sorted(files, key=lambda name: (order.index(name) if name in order else len(order), name))
    return [Suite(name, read_prompts(files[name])) for name in names]


@contextmanager
def open_evaluator(
    model: Path, settings: EvaluateSettings, context: StageContext, longest: int
) -> Iterator[tuple[Evaluator, SwappableEngine]]:
    """An evaluator of the model in the folder `model`, and its engine.

    `longest` is the largest number of tokens of a prompt with its response.
    """
    generator = open_generator(settings.evaluation.engine, model, settings.dtype, longest, context)
    try:
        with open_grader(settings, context) as grader, closing(Judges(context.out / JUDGE_CACHE)) as judges:
            tokenizer = load_tokenizer(model)
            client = open_client(settings.environment, generator.engine, tokenizer, generator.lanes, judges)
            evaluator = Evaluator(
                client,
                grader,
                settings.evaluation,
                settings.seed,
                generator.batch_size,
                calls_at_once=generator.calls_at_once,
                limits=_limits(settings),
            )
            yield evaluator, generator.engine
    finally:
        generator.engine.close()


def _cells_of_endpoint(settings: EvaluateSettings, data: Path) -> list[SuiteDecoding]:
    """Like `read_cells`, for a model with unknown tokenizer and context length."""
    suites = read_suites(data, settings.evaluation.only)
    for suite in suites:
        check_problems(suite, partial(render_as_text, template=settings.evaluation.template_of(suite.name)))
    return [(suite, decoding) for decoding in settings.evaluation.decodings for suite in suites]


@contextmanager
def _open_endpoint(
    model: EndpointModel, cells: Sequence[SuiteDecoding], settings: EvaluateSettings, context: StageContext
) -> Iterator[tuple[Evaluator, TextEndpoint]]:
    """An evaluator of a model served by an endpoint; saved responses are deleted once all of them are graded."""
    templates = [settings.evaluation.template_of(suite.name) for suite, _ in cells]
    with closing(TextAnswers(context.out / _ANSWERS)) as answers, closing(Judges(context.out / JUDGE_CACHE)) as judges:
        generator = open_endpoint(model, templates, context.execution, answers)
        with closing(generator.endpoint), open_grader(settings, context) as grader:
            client = open_text_client(settings.environment, generator.endpoint, judges)
            evaluator = Evaluator(
                client, grader, settings.evaluation, settings.seed, generator.batch_size, limits=_limits(settings)
            )
            yield evaluator, generator.endpoint
    answers.remove()


def _limits(settings: EvaluateSettings) -> EpisodeLimits | None:
    return None if settings.environment is None else settings.environment.limits


@contextmanager
def open_grader(settings: EvaluateSettings, context: StageContext) -> Iterator[GraderPool]:
    """The graders for these settings."""
    own, cache = settings.evaluation.own_graders, context.out / JUDGE_CACHE
    with GraderPool.configured(context.execution.grader_workers, settings.grading, cache, own) as grader:
        yield grader


def adopt_parts(
    waiting: Sequence[SuiteDecoding],
    requests: EvaluationRequests,
    settings: EvaluateSettings,
    context: StageContext,
    out: Path,
    progress: ResponseProgress,
) -> list[SuiteDecoding]:
    """Write the parts in `out` whose responses an earlier evaluation sampled; returns the remaining cells."""
    names = {(suite.name, decoding): (suite, decoding) for suite, decoding in waiting}
    found = find_sampled(context.out, {cell: requests.digests[cell] for cell in names if cell in requests.digests})
    # Parts that this evaluation has begun are continued instead.
    begun = {cell for cell, named in names.items() if _log_file(out, *named).exists()}
    found = {folder: [cell for cell in cells if cell not in begun] for folder, cells in found.items()}
    for folder, cells in found.items():
        parts = {cell: _part(out, *names[cell]) for cell in cells}
        with open_grader(settings, context) as grader:
            for cell in adopt(folder, parts, requests, grader, progress.add_adopted):
                context.events.message(f"{', '.join(cell)}: responses of {folder.name}, graded again")
                del names[cell]
    return list(names.values())


def fill_parts(evaluator: Evaluator, cells: Sequence[SuiteDecoding], out: Path, progress: ResponseProgress) -> None:
    """Generate the responses of `cells` and save them, graded, in `out`."""
    progress.begin()
    logged = [(SampleLog(_log_file(out, *cell), progress.skip), *cell) for cell in cells]
    for (log, suite, decoding), records in zip(logged, evaluator.evaluate_into(logged, progress.add), strict=True):
        write_sample_records(_part(out, suite, decoding), records)
        log.remove()
        logger.info("%s, %s: done", suite.name, decoding)


def _part(out: Path, suite: Suite, decoding: str) -> Path:
    return out / _PARTS / f"{quote(decoding, safe='')}@{quote(suite.name, safe='')}.jsonl.zst"


def _log_file(out: Path, suite: Suite, decoding: str) -> Path:
    part = _part(out, suite, decoding)
    return part.parent / _OPEN / part.stem


def num_responses(cells: Sequence[SuiteDecoding], settings: EvaluateSettings) -> int:
    """Number of responses in `cells`."""
    return sum(len(suite.prompts) * settings.evaluation.protocol(suite.name, name).num_samples for suite, name in cells)


def _context_length(model: Path) -> int | None:
    config = parse_json((model / "config.json").read_text(encoding="utf-8"))
    return config.get("max_position_embeddings")


def _headline(rows: Sequence[ResultRow]) -> dict[str, float]:
    return {f"accuracy/{row.decoding}/{row.suite}": row.accuracy for row in rows}


if __name__ == "__main__":
    main("evaluate", run, defers_stop_requests=True)

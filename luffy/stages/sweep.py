"""Evaluates checkpoints of an RL run on all suites and decodings, with engines whose weights are swapped.

Run: python -m luffy.stages.sweep --config DIR/config.yaml --out DIR

Writes a folder `step_000100/` for each step, with the files that `evaluate` writes, and curve.html. A killed sweep
continues with the batch it was at; responses from an earlier sweep of the same run are reused and only graded again.
"""

import logging
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from luffy.config.settings import SweepSettings
from luffy.data.templates import load_tokenizer
from luffy.errors import DataError
from luffy.evaluation.model_clients import render_as_ids
from luffy.evaluation.results import RESULTS_FILE, count_correct, read_results
from luffy.evaluation.sample_files import read_samples_of
from luffy.files import write_atomic
from luffy.pipeline.reuse import complete_checkpoints
from luffy.report.evaluation_page import SweptStep, checkpoints_page
from luffy.report.page import html
from luffy.rollout.engine import SwappableEngine
from luffy.stages.adoption import EvaluationRequests, write_digests
from luffy.stages.evaluate import (
    OUTPUTS,
    SuiteDecoding,
    adopt_parts,
    fill_parts,
    num_responses,
    open_evaluator,
    read_cells,
    waiting_cells,
    write_cells,
)
from luffy.stages.program import StageContext, StageResult, main
from luffy.stages.responses import ResponseProgress
from luffy.training.checkpoint import export_checkpoint

logger = logging.getLogger(__name__)
PAGE_FILE = "curve.html"
_SWAP = "swap"
"""Temporary model folder of a checkpoint, while it is evaluated."""


def run(settings: SweepSettings, context: StageContext) -> StageResult:
    """Evaluate the checkpoints of the upstream RL stage at `settings.steps`, in that order."""
    protocol, rl = settings.protocol, context.inputs["model"]
    cells, longest = read_cells(protocol, context.inputs["data"], rl / "model")
    waiting = {step: waiting_cells(cells, _folder(context, step)) for step in settings.steps}
    waiting = {step: left for step, left in waiting.items() if left}
    total = num_responses(cells, protocol) * len(settings.steps)
    num_left = sum(num_responses(cells, protocol) for cells in waiting.values())
    progress = ResponseProgress(context, total, done=total - num_left)
    render = render_as_ids(load_tokenizer(rl / "model"))
    requests = {
        # The digest of the final model does not identify the checkpoints of a run; its key does.
        step: EvaluationRequests(cells, protocol, render, rl, variant=f"@{rl.name}/{step}")
        for step in settings.steps
    }
    waiting = {
        step: adopt_parts(cells_left, requests[step], protocol, context, _folder(context, step), progress)
        for step, cells_left in waiting.items()
    }
    waiting = {step: left for step, left in waiting.items() if left}
    if waiting:
        checkpoints = _checkpoints(rl, list(waiting))
        with open_evaluator(rl / "model", protocol, context, longest) as (evaluator, engine):
            for step, cells_left in waiting.items():
                with _loaded(engine, checkpoints[step], step, settings, context):
                    fill_parts(evaluator, cells_left, _folder(context, step), progress)
    for step in settings.steps:
        write_digests(_folder(context, step), requests[step].digests)
    metrics = _write(cells, settings, context)
    outputs = (*(f"{_folder(context, step).name}/{name}" for step in settings.steps for name in OUTPUTS), PAGE_FILE)
    return StageResult(outputs, metrics, total - progress.graded)


def _checkpoints(rl: Path, steps: Sequence[int]) -> Mapping[int, Path]:
    there = complete_checkpoints(rl)
    missing = [str(step) for step in steps if step not in there]
    if missing:
        found = ", ".join(map(str, sorted(there))) or "none"
        raise DataError(f"{rl}: no checkpoint of step {', '.join(missing)}; there are: {found}")
    return there


@contextmanager
def _loaded(
    engine: SwappableEngine, checkpoint: Path, step: int, settings: SweepSettings, context: StageContext
) -> Iterator[None]:
    """Load a checkpoint into the engine, through a model folder, which every kind of engine can read.

    The folder stays for the length of the context: an engine that has to be replaced reads it again.
    """
    folder = context.out / _SWAP
    shutil.rmtree(folder, ignore_errors=True)  # left by a killed run
    rl, tokenizer = context.inputs["model"], context.inputs["data"] / "tokenizer"
    export_checkpoint(checkpoint, rl, tokenizer, settings.protocol.dtype, folder)
    engine.load_weights_from(folder, step)
    logger.info("loaded the weights of step %d", step)
    yield
    shutil.rmtree(folder)


def _write(cells: Sequence[SuiteDecoding], settings: SweepSettings, context: StageContext) -> dict[str, float]:
    """Write the results of each step and the page; returns accuracies by decoding, suite and step."""
    metrics: dict[str, float] = {}
    for step in settings.steps:
        rows = write_cells(cells, settings.protocol, _folder(context, step), f"step {step}")
        metrics |= {f"accuracy/{row.decoding}/{row.suite}/{step}": row.accuracy for row in rows}
    swept = [_read(step, _folder(context, step)) for step in sorted(settings.steps)]
    write_atomic(context.out / PAGE_FILE, html(checkpoints_page(swept)))
    return metrics


def _read(step: int, folder: Path) -> SweptStep:
    return SweptStep(step, read_results(folder / RESULTS_FILE), count_correct(read_samples_of(folder)))


def _folder(context: StageContext, step: int) -> Path:
    return context.out / f"step_{step:06d}"


if __name__ == "__main__":
    main("sweep", run, defers_stop_requests=True)

"""Evaluates checkpoints of an RL run on all suites and decodings, with engines whose weights are swapped.

Run: python -m luffy.stages.sweep --config DIR/config.yaml --out DIR

Writes a folder `step_000100/` for each step, with the files that `evaluate` writes, curve.html and summary.md.
A killed sweep continues with the batch it was at; responses from an earlier sweep of the same run are reused and only
graded again.
"""

import logging
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from luffy.config.settings import SweepSettings
from luffy.errors import DataError
from luffy.evaluation.results import read_scores
from luffy.files import write_atomic
from luffy.pipeline.reuse import complete_checkpoints
from luffy.report.evaluation_page import SUMMARY_FILE, checkpoints_page
from luffy.report.page import html, markdown
from luffy.rollout.engine import SwappableEngine
from luffy.stages.answers.asker import ResponseProgress, open_asker
from luffy.stages.evaluate import OUTPUTS, ModelEvaluation, read_requests
from luffy.stages.program import StageContext, StageResult, main
from luffy.training.checkpoint import export_checkpoint

logger = logging.getLogger(__name__)
PAGE_FILE = "curve.html"
_SWAP = "swap"
"""Temporary model folder of a checkpoint, while it is evaluated."""


def run(settings: SweepSettings, context: StageContext) -> StageResult:
    """Evaluate the checkpoints of the upstream RL stage at `settings.steps`, in that order."""
    protocol, rl = settings.protocol, context.inputs["model"]
    requests, longest = read_requests(protocol, context.inputs["data"], rl / "model")
    evaluations = {
        # The digest of the final model does not identify the checkpoints of a run; its key does.
        step: ModelEvaluation(_folder(context, step), requests, protocol, rl, variant=f"@{rl.name}/{step}")
        for step in settings.steps
    }
    total = sum(each.num_responses for each in evaluations.values())
    progress = ResponseProgress(context, total, done=total - sum(each.num_left for each in evaluations.values()))
    for evaluation in evaluations.values():
        evaluation.adopt(context, progress)
    rows = {step: each.write(f"step {step}") for step, each in evaluations.items() if not each.num_left}
    waiting = [step for step in settings.steps if step not in rows]
    if waiting:
        checkpoints = complete_checkpoints(rl)
        if missing := [str(step) for step in waiting if step not in checkpoints]:
            found = ", ".join(map(str, sorted(checkpoints))) or "none"
            raise DataError(f"{rl}: no checkpoint of step {', '.join(missing)}; there are: {found}")
        left = sum(evaluations[step].num_left for step in waiting)
        engine = protocol.evaluation.engine
        with open_asker(protocol, engine, context, longest, progress, left) as (asker, generator):
            progress.begin()
            for step in waiting:
                with _loaded(generator.engine, checkpoints[step], step, settings, context):
                    evaluations[step].ask(asker, progress)
                rows[step] = evaluations[step].write(f"step {step}")
    metrics = {
        f"accuracy/{row.decoding}/{row.suite}/{step}": row.accuracy for step in settings.steps for row in rows[step]
    }
    swept = {step: read_scores(_folder(context, step)) for step in sorted(settings.steps)}
    page = checkpoints_page(swept)
    write_atomic(context.out / PAGE_FILE, html(page))
    write_atomic(context.out / SUMMARY_FILE, markdown(page))
    of_steps = (f"{_folder(context, step).name}/{name}" for step in settings.steps for name in OUTPUTS)
    return StageResult((*of_steps, PAGE_FILE, SUMMARY_FILE), metrics, total - progress.graded)


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


def _folder(context: StageContext, step: int) -> Path:
    return context.out / f"step_{step:06d}"


if __name__ == "__main__":
    main("sweep", run, defers_stop_requests=True)

"""The runs of a study under Prefect: tuning first, then all reported runs, within a budget of hours."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from luffy.cli.console import stage_title
from luffy.config.many_runs.study import CellRun, Chosen, Study, distinct
from luffy.errors import LuffyError
from luffy.evaluation.study.study_progress import StudyProgress
from luffy.pipeline.workspace import Workspace
from luffy.tasks.many_runs import ManyRuns, first_line, open_runs, run_all


class OutOfTime(LuffyError):
    """The budget of hours is spent: no further run starts."""


@dataclass(frozen=True, slots=True)
class StudyOutcome:
    """What one call of `run_cells` achieved."""

    failures: list[str]
    """A line for each failed run."""
    num_runs: int
    """Runs that were not finished when the call began, as far as tuning has settled them."""
    num_left: int
    """Runs that are not finished, failed ones included."""
    is_out_of_time: bool


@contextmanager
def open_study(study: Study, cells: Sequence[str], workspace: Workspace, *, verify: bool) -> Iterator[ManyRuns]:
    """Open what the runs of `cells` share (see `open_runs`)."""
    # An arm has the same stages at every point of its grid, so titles can be listed before values are chosen.
    runs = [*study.tuning_runs(cells), *study.reported_runs(cells, study.first_points())]
    titles = list(dict.fromkeys(stage_title(run.titled.title, node) for run in runs for node in run.run.nodes))
    workers = study.config.workers
    with open_runs(study.common, titles, workspace, workers=workers, verify=verify, tag="study") as running:
        yield running


def run_cells(
    running: ManyRuns,
    study: Study,
    cells: Sequence[str],
    *,
    chosen: Chosen | None,
    budget_hours: float | None,
    clock: Callable[[], float] = time.monotonic,
) -> StudyOutcome:
    """Execute the unfinished runs of `cells`: tuning first, unless `chosen` gives the values, then reported runs."""
    progress = StudyProgress(study, running.workspace, verify=running.verify)
    began, num_runs, out_of_time, failures = clock(), 0, False, list[str]()

    def check_start() -> None:
        if budget_hours is not None and clock() - began >= 3600 * budget_hours:
            raise OutOfTime("not started: the budget of hours is spent")

    def make(runs: Sequence[CellRun]) -> None:
        nonlocal num_runs, out_of_time
        left = progress.left(runs)
        num_runs += len(left)
        outcomes = run_all(running, [run.titled for run in left], {}, check_start)
        for run in left:
            outcome = outcomes[run.titled.folder]
            out_of_time = out_of_time or isinstance(outcome, OutOfTime)
            if isinstance(outcome, LuffyError) and not isinstance(outcome, OutOfTime):
                failures.append(f"{run.titled.title}: {first_line(outcome)}")
        progress.forget()

    tuning = study.tuning_runs(cells) if chosen is None else []
    if chosen is None:
        make(tuning)
        chosen = progress.chosen(cells)
    make(study.reported_runs(cells, chosen))
    expected = study.reported_runs(cells, study.first_points())
    reported = study.reported_runs(cells, chosen)
    # Runs of arms without a chosen value are left, too.
    unchosen = len(distinct(expected)) - len(distinct(reported)) if len(expected) > len(reported) else 0
    return StudyOutcome(failures, num_runs, len(progress.left([*tuning, *reported])) + unchosen, out_of_time)

"""The runs of a study under Prefect: arms tuned first, then all reported runs, within a budget of time."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from luffy.cli.console import stage_title
from luffy.config.study import CellRun, Chosen, Study, distinct
from luffy.errors import LuffyError
from luffy.evaluation.study.study_progress import StudyProgress
from luffy.pipeline.workspace import Workspace
from luffy.tasks.many_runs import ManyRuns, first_line, open_runs, run_all


class OutOfTime(LuffyError):
    """The budget of hours is spent: no further run starts."""


@dataclass(frozen=True, slots=True)
class StudyOutcome:
    """How far one command has come."""

    failures: list[str]
    """A line for each failed run."""
    num_left: int
    """Runs that are not finished, failed ones included."""
    is_out_of_time: bool


@contextmanager
def open_study(study: Study, cells: Sequence[str], workspace: Workspace, *, verify: bool) -> Iterator[ManyRuns]:
    """Open everything that the runs of `cells` need, and record how the command ended."""
    # Whatever is chosen, a run of an arm has the stages that it has at the first point.
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
    """Make the unfinished runs of `cells`; `chosen` replaces tuning. What is finished is not started again."""
    progress = StudyProgress(study, running.workspace, verify=running.verify)
    began, out_of_time, failures = clock(), False, list[str]()

    def check_start() -> None:
        if budget_hours is not None and clock() - began >= 3600 * budget_hours:
            raise OutOfTime("not started: the budget of hours is spent")

    def make(runs: Sequence[CellRun]) -> None:
        nonlocal out_of_time
        left = progress.left(runs)
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
    unchosen = len(distinct(expected)) - len(distinct(reported)) if len(expected) > len(reported) else 0
    return StudyOutcome(failures, len(progress.left([*tuning, *reported])) + unchosen, out_of_time)

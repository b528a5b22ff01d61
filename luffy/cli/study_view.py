"""What `luffy study` prints and writes without starting a run: the plan, the parquet files, the page."""

from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean

from luffy.cli.console import duration, say, show_report_path, text_table, wide_terminal
from luffy.config.many_runs.study import CellRun, Study, distinct
from luffy.errors import DataError, UserError
from luffy.evaluation.study.study_findings import find_effects
from luffy.evaluation.study.study_progress import StudyProgress, seconds_of
from luffy.evaluation.study.study_results import (
    BASE,
    collect_results,
    joined_results,
    read_study_results,
    result_files,
    write_results,
)
from luffy.files import write_atomic
from luffy.pipeline.workspace import Workspace
from luffy.report.sweep_pages import study_figure, study_html, study_markdown

_HEADER = ("cell", "levels", "runs", "done", "left", "estimated time")


def show_study_plan(study: Study, cells: Sequence[str], workspace: Workspace, *, verify: bool) -> None:
    """Print the cells with their runs, what is done and left, and how long that takes; spends nothing."""
    progress = StudyProgress(study, workspace, verify=verify)
    tuning = distinct(study.tuning_runs(cells))
    chosen = progress.chosen(cells)
    expected, known = ([*study.reported_runs(cells, each)] for each in (study.first_points(), chosen))
    # A run whose values are not chosen yet cannot be done; it is counted as it would be at the first point.
    places = {(run.cell, run.run.arm, run.run.seed): run for run in known}
    reported = [places.get((run.cell, run.run.arm, run.run.seed)) or run for run in expected]
    unchosen = {run.made_as for run in reported if (run.cell, run.run.arm, run.run.seed) not in places}
    done = {
        run.made_as
        for run in [*tuning, *reported]
        if run.made_as not in unchosen and progress.finished(run) is not None
    }
    seconds = _seconds(progress, [*tuning, *distinct(reported)], done)
    say(f"workspace {workspace.root}")
    rows, seen = list[tuple[str, ...]](), set[str]()
    if tuning:
        rows.append(_row("tuning", f"at {study.config.tuned_at}", tuning, done, seconds, study.config.workers))
    for cell in cells:
        runs = [run for run in distinct(reported_of(reported, cell)) if run.made_as not in seen]
        seen |= {run.made_as for run in runs}
        rows.append(_row(cell, _levels(study, cell), runs, done, seconds, study.config.workers))
    everything = [*tuning, *distinct(reported)]
    rows.append(_row("all", "", everything, done, seconds, study.config.workers))
    wide_terminal().print(text_table(_HEADER, rows))
    say(f"{len(study.config.planned)} planned tests; a run that several cells share is counted in the first of them")
    if not seconds:
        say("times are known once a run of each arm is finished")


def reported_of(runs: Sequence[CellRun], cell: str) -> list[CellRun]:
    """The runs of one cell."""
    return [run for run in runs if run.cell == cell]


def collect(study: Study, workspace: Workspace, *, verify: bool) -> None:
    """Add the finished results of all cells to those beside the design.

    Raises UserError where no run is finished, or where the files hold another result of one of them.
    """
    results = collect_results(study, StudyProgress(study, workspace, verify=verify), study.cells)
    if not results.outcomes:
        raise UserError(f"workspace {workspace.root}: no run of {study.config.name} is finished; nothing is written")
    files = result_files(study.path, study.config.name)
    if any(path.exists() for path in files):
        try:
            results = joined_results(read_study_results(files).in_design(study), results)
        except DataError as error:
            raise UserError(
                f"{files[0]}: does not go with workspace {workspace.root} ({error}); delete "
                f"{files[0].name} and {files[1].name} to write only the results of this workspace"
            ) from None
    write_results(results, files)
    num_runs = len({row.place[:5] for row in results.outcomes if row.role != BASE})
    for path in files:
        say(f"{path}: {num_runs} runs, {path.stat().st_size:,} bytes")


def write_pages(study: Study) -> None:
    """Write the page, the figure and the tables beside the design, out of the parquet files."""
    results = read_study_results(result_files(study.path, study.config.name))
    findings, folder, name = find_effects(study, results), study.path.parent, study.config.name
    write_atomic(folder / f"{name}.html", study_html(findings, results))
    write_atomic(folder / f"{name}.results.md", study_markdown(findings, results))
    write_atomic(folder / f"{name}.svg", study_figure(findings))
    show_report_path(folder / f"{name}.html")


def _seconds(progress: StudyProgress, runs: Sequence[CellRun], done: set[str]) -> dict[str, float]:
    """Mean time of a finished run by arm; under "" the mean over all arms."""
    times: dict[str, list[float]] = defaultdict(list)
    for run in runs:
        if run.made_as in done and (finished := progress.finished(run)) is not None:
            times[run.run.arm].append(seconds_of(finished))
    means = {arm: fmean(values) for arm, values in times.items()}
    return means | {"": fmean(means.values())} if means else {}


def _row(
    name: str, levels: str, runs: Sequence[CellRun], done: set[str], seconds: dict[str, float], workers: int
) -> tuple[str, ...]:
    left = [run for run in runs if run.made_as not in done]
    time = "-"
    if seconds and left:
        time = duration(sum(seconds.get(run.run.arm, seconds[""]) for run in left) / workers)
    return name, levels, str(len(runs)), str(len(runs) - len(left)), str(len(left)), time


def _levels(study: Study, cell: str) -> str:
    """The labels of the levels that leave the centre."""
    axes = study.config.axes
    return ", ".join(
        f"{axes[name].title}: {axes[name].levels[level].label}"
        for name, level in study.cells[cell].items()
        if level != axes[name].centre
    )

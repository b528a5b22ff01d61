"""What `luffy study` prints and writes without starting a run: the plan, the parquet files, the page, a comparison.

The comparison is of cells that were run again in a fresh workspace with the committed results.
"""

import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from luffy.cli.console import say, show_error, show_rows
from luffy.config.many_runs.sweep_runs import Sweep, distinct
from luffy.errors import DataError, UserError
from luffy.evaluation.across_runs.run_results import (
    BASE,
    REPORTED,
    TRIED,
    SweepResults,
    first_difference,
    joined_results,
    read_sweep_results,
    result_files,
    write_results,
)
from luffy.evaluation.across_runs.sweep_findings import Effect, SweepProgress, find
from luffy.files import write_atomic
from luffy.pipeline.workspace import Workspace
from luffy.report.cells import duration
from luffy.report.page import html
from luffy.report.sweep_pages import study_figure, study_markdown, study_page

_MARK = "reproduction.json"


def show_study_plan(study: Sweep, cells: Sequence[str], workspace: Workspace, *, verify: bool) -> None:
    """Print the cells with their runs, what is done and left, and how long that takes; spends nothing."""
    progress, design = SweepProgress(study, workspace, verify=verify), study.design
    tuning = distinct(study.tuning_runs(cells))
    chosen = progress.chosen(cells)
    expected, known = ([*study.reported_runs(cells, each)] for each in (None, chosen))
    # A run whose values are not chosen yet cannot be done; it is counted as it would be at the first point.
    places = {(run.cell, run.arm, run.seed): run for run in known}
    reported = [places.get((run.cell, run.arm, run.seed)) or run for run in expected]
    unchosen = {run.made_as for run in reported if (run.cell, run.arm, run.seed) not in places}
    unique = distinct(reported)
    everything = [*tuning, *unique]
    times: dict[str, list[float]] = defaultdict(list)
    done = set[str]()
    for run in everything:
        if run.made_as not in unchosen and progress.finished(run) is not None:
            done.add(run.made_as)
            times[run.arm].append(progress.seconds(run))
    seconds = {arm: fmean(values) for arm, values in times.items()}
    parts = [("tuning", f"at {design.tuned_at}", tuning)] if tuning else []
    parts += [(cell, design.situation(cell), [run for run in unique if run.cell == cell]) for cell in cells]
    rows = []
    for name, levels, runs in [*parts, ("all", "", everything)]:
        left, time = [run for run in runs if run.made_as not in done], "-"
        if seconds and left:
            mean = fmean(seconds.values())
            time = duration(sum(seconds.get(run.arm, mean) for run in left) / design.workers)
        rows.append((name, levels, str(len(runs)), str(len(runs) - len(left)), str(len(left)), time))
    say(f"workspace {workspace.root}")
    show_rows(("cell", "levels", "runs", "done", "left", "estimated time"), rows)
    say(f"{len(design.planned)} planned tests; a run that several cells share is counted in the first of them")
    if not seconds:
        say("times are known once a run of each arm is finished")


def collect(study: Sweep, workspace: Workspace, *, verify: bool) -> None:
    """Add the finished results of all cells to those beside the design.

    Raises UserError where no run is finished, or where the files hold another result of one of them.
    """
    progress = SweepProgress(study, workspace, verify=verify)
    reported = study.reported_runs(study.cells, progress.chosen(study.cells))
    results = progress.collect([*study.tuning_runs(study.cells), *reported])
    if results.outcomes.empty:
        raise UserError(f"workspace {workspace.root}: no run of {study.design.name} is finished; nothing is written")
    files = result_files(study.path, study.design.name)
    if any(path.exists() for path in files):
        try:
            in_design = read_sweep_results(files).where(cell=study.cells, arm=("", *study.design.arms))
            results = joined_results(in_design, results)
        except DataError as error:
            raise UserError(
                f"{files[0]}: does not go with workspace {workspace.root} ({error}); delete "
                f"{files[0].name} and {files[1].name} to write only the results of this workspace"
            ) from None
    write_results(results, files)
    runs = results.where(role=(REPORTED, TRIED)).outcomes[["cell", "role", "arm", "point", "seed"]]
    num_runs = len(runs.drop_duplicates())
    for path in files:
        say(f"{path}: {num_runs} runs, {path.stat().st_size:,} bytes")


def write_pages(study: Sweep) -> None:
    """Write the page, the figure and the tables beside the design, out of the parquet files."""
    results = read_sweep_results(result_files(study.path, study.design.name))
    findings, folder, name = find(study, results), study.path.parent, study.design.name
    write_atomic(folder / f"{name}.html", html(study_page(findings, results)))
    write_atomic(folder / f"{name}.results.md", study_markdown(findings, results))
    write_atomic(folder / f"{name}.svg", study_figure(findings))
    say(f"report: {folder}/{name}.html")


def fresh_workspace(study: Sweep, root: Path) -> Workspace:
    """A workspace at `root` that holds nothing but earlier attempts to reproduce this study; else UserError."""
    mark, own = root / _MARK, json.dumps({"study": study.design.name})
    if root.exists() and not root.is_dir():
        raise UserError(f"{root}: is a file; give a folder by --workspace")
    if root.exists() and any(root.iterdir()) and not (mark.is_file() and mark.read_text(encoding="utf-8") == own):
        raise UserError(f"{root}: is not empty, so results there would be reused; give another folder by --workspace")
    root.mkdir(parents=True, exist_ok=True)
    write_atomic(mark, own)
    return Workspace(root)


def needed_results(study: Sweep, cells: Sequence[str]) -> SweepResults:
    """The committed results; UserError where a run of one of the cells is missing."""
    committed = read_sweep_results(result_files(study.path, study.design.name))
    reported = committed.where(role=[REPORTED]).outcomes
    there = {*reported[["cell", "arm", "seed"]].itertuples(index=False, name=None)}
    for cell in cells:
        wanted = [(cell, arm, seed) for arm in study.design.arms for seed in study.seeds(cell)]
        if missing := [f"{arm} {seed}" for _, arm, seed in wanted if (cell, arm, seed) not in there]:
            raise UserError(
                f"{study.path}: the committed results of cell {cell} lack {len(missing)} of {len(wanted)} runs "
                f"({missing[0]} is the first); finish and collect them before reproducing"
            )
    return committed


def is_reproduced(study: Sweep, cells: Sequence[str], workspace: Workspace) -> bool:
    """Whether the runs in `workspace` equal the committed ones bit for bit.

    Prints this, or the first difference below the effects of each arm on the primary measure, as committed and again.
    """
    committed = needed_results(study, cells)
    chosen = committed.chosen_for(study, cells)
    again = SweepProgress(study, workspace).collect(study.reported_runs(cells, chosen))
    before, after = (each.where(cell=cells, role=(REPORTED, BASE)) for each in (committed, again))
    difference = first_difference(before, after)
    if difference is None:
        say(f"reproduced, bit for bit: {', '.join(cells)}")
        return True
    sides = find(study, before), find(study, after)
    effects = [
        (cell, arm, *(effect_words(side.effect(cell, arm)) for side in sides))
        for cell in cells
        for arm in study.design.others
    ]
    title = f"Effects against {study.design.reference} in percentage points, with their intervals"
    show_rows(("cell", "arm", "committed", "again"), effects, title)
    say("another kind of CPU rounds differently, unless both use execution.cpu_instructions=avx2")
    show_error(f"not reproduced: {difference}")
    return False


def effect_words(effect: Effect | None) -> str:
    """The difference in percentage points with its interval, without a correction for many tests."""
    if effect is None:
        return "-"
    found = effect.result.difference
    return f"{100 * found.value:+.1f} [{100 * found.low:.1f}, {100 * found.high:.1f}]"

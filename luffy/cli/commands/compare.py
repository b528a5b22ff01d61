"""`luffy compare CONFIG`: methods under one budget, one experiment over a grid, or a study, with several seeds."""

from typing import Annotated

from typer import Option

from luffy.cli.console import say
from luffy.cli.options import Debug, DryRun, Overrides, Verify, WorkspaceFolder, config_argument
from luffy.cli.planning import check, show_sweep_plan
from luffy.config.many_runs.sweep_runs import Sweep, load_sweep
from luffy.errors import EXIT_OK, DataError, UserError
from luffy.evaluation.across_runs.run_results import (
    REPORTED,
    TRIED,
    joined_results,
    read_sweep_results,
    result_files,
    write_results,
)
from luffy.evaluation.across_runs.sweep_findings import SweepProgress, find
from luffy.files import write_atomic
from luffy.flows.launch import launch
from luffy.pipeline.workspace import Workspace, find_workspace
from luffy.report.page import html
from luffy.report.sweep_pages import study_figure, study_page

_HELP = "YAML file of a comparison, a grid, a study or an experiment, or the name of a shipped one (compare_arithmetic)"


def compare(
    config: Annotated[str, config_argument(_HELP)],
    overrides: Overrides = None,
    over: Annotated[
        list[str] | None,
        Option("--over", metavar="KEY.PATH=[VALUES]", help="for an experiment: values to try; may be repeated"),
    ] = None,
    seeds: Annotated[
        list[int] | None, Option("--seed", help="for an experiment: a seed of SFT and RL; may be repeated")
    ] = None,
    cells: Annotated[str | None, Option("--cells", metavar="A,B", help="for a study: only these cells")] = None,
    collect: Annotated[
        bool, Option("--collect", help="for a study: add finished results to the parquet files beside the design")
    ] = False,
    page: Annotated[
        bool, Option("--page", help="for a study: write page, figure and tables from these files alone")
    ] = False,
    dry_run: DryRun = False,
    verify: Verify = False,
    workspace: WorkspaceFolder = None,
    debug: Debug = False,
) -> int:
    """Compare methods under one budget, or the values of a grid, with several seeds; a study in many cells.

    What runs share is made once. A failed run does not stop the others; the same command tries it again, and a study
    does not start finished runs again.
    """
    sweep, where = load_sweep(config, overrides or (), over or (), seeds or ()), find_workspace(workspace)
    of_studies = {"--cells": cells, "--collect": collect, "--page": page}
    given = [option for option, value in of_studies.items() if value not in (None, False)]
    if given and not sweep.design.cells:
        raise UserError(f"{given[0]} has no effect on a {sweep.design.kind}, only on a study; remove it")
    if cells is not None and (collect or page):
        raise UserError(f"--cells has no effect with {given[1]}, which is about all cells; remove it")
    names = [name.strip() for name in (cells or "").split(",") if name.strip()]
    if cells is not None and not names:
        raise UserError(f"--cells {cells!r}: names no cell; give one or more, separated by commas")
    selected = sweep.selected(names)
    sweep.check(selected)
    if collect or page:
        if collect:
            _collect(sweep, where, verify=verify)
        if page:
            _write_pages(sweep)
    elif dry_run:
        show_sweep_plan(sweep, where, selected, verify=verify)
    else:
        check(sweep.started_with(selected), where)
        parameters = {
            "config_file": config,
            "overrides": overrides or [],
            "over": over or [],
            "seeds": seeds or [],
            "cells": list(selected) if sweep.design.cells else [],
            "verify": verify,
        }
        return launch("luffy.flows.run_sweep:run_sweep", parameters, where, None, debug=debug)
    return EXIT_OK


def _collect(study: Sweep, workspace: Workspace, *, verify: bool) -> None:
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
            advice = f"delete {files[0].name} and {files[1].name} to write only the results of this workspace"
            raise UserError(f"{files[0]}: does not go with workspace {workspace.root} ({error}); {advice}") from None
    write_results(results, files)
    runs = results.where(role=(REPORTED, TRIED)).outcomes[["cell", "role", "arm", "point", "seed"]].drop_duplicates()
    for path in files:
        say(f"{path}: {len(runs)} runs, {path.stat().st_size:,} bytes")


def _write_pages(study: Sweep) -> None:
    """Write the page and the figure beside the design, out of the parquet files."""
    results = read_sweep_results(result_files(study.path, study.design.name))
    findings, folder, name = find(study, results), study.path.parent, study.design.name
    write_atomic(folder / f"{name}.html", html(study_page(findings, results)))
    write_atomic(folder / f"{name}.svg", study_figure(findings))
    say(f"report: {folder}/{name}.html")

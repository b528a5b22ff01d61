"""`luffy study DESIGN`: methods compared in many cells around a centre, over days and machines."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from typer import Option

from luffy.cli.commands.compare import FLOW
from luffy.cli.options import Debug, Verify, WorkspaceFolder, config_argument
from luffy.cli.planning import check
from luffy.config.many_runs.sweep_runs import Sweep, load_sweep
from luffy.errors import EXIT_FAILURE, EXIT_OK, UserError
from luffy.flows.launch import launch
from luffy.pipeline.workspace import Workspace, find_workspace


def study(
    design: Annotated[
        str, config_argument("YAML file of a study, or the name of a shipped one (study_smoke)", "DESIGN")
    ],
    plan: Annotated[bool, Option("--plan", help="print cells, runs, what is left and its time; start nothing")] = False,
    cells: Annotated[str | None, Option("--cells", metavar="A,B", help="only these cells")] = None,
    budget_hours: Annotated[
        float | None,
        Option("--budget-hours", metavar="H", min=0.0, help="start no run later than H hours after the first"),
    ] = None,
    collect: Annotated[
        bool, Option("--collect", help="add finished results to the parquet files beside the design")
    ] = False,
    page: Annotated[bool, Option("--page", help="write page, figure and tables from the parquet files only")] = False,
    reproduce: Annotated[
        str | None, Option("--reproduce", metavar="A,B", help="run cells again in a fresh workspace, and compare")
    ] = None,
    verify: Verify = False,
    workspace: WorkspaceFolder = None,
    debug: Debug = False,
) -> int:
    """Compare methods in many cells around a centre, over days and machines.

    Without an option it executes the unfinished runs; repeat the command to continue an interrupted study.
    """
    wanted = {"--plan": plan, "--collect": collect, "--page": page, "--reproduce": reproduce is not None}
    given = [name for name, is_given in wanted.items() if is_given]
    if len(given) > 1 and given != ["--collect", "--page"]:
        raise UserError(f"{' and '.join(given)}: give one of them")
    if reproduce is not None and cells is not None:
        raise UserError("--cells has no effect with --reproduce, which names its cells; remove it")
    if cells is not None and (collect or page):
        raise UserError(f"--cells has no effect with {given[0]}, which is about all cells; remove it")
    loaded = load_sweep(design, wanted="study")
    selected = loaded.selected(_names("--cells", cells) or _names("--reproduce", reproduce))
    loaded.check(selected)
    if reproduce is not None:
        from luffy.cli.study_view import fresh_workspace, is_reproduced, needed_results

        needed_results(loaded, selected)
        where = fresh_workspace(loaded, Path(workspace) if workspace else Path(f"reproduced-{loaded.design.name}"))
        code = _run(loaded, selected, where, {"as_committed": True}, debug=debug)
        return EXIT_FAILURE if code == EXIT_OK and not is_reproduced(loaded, selected, where) else code
    if not given:
        where = find_workspace(workspace)
        check([each.config for each in loaded.candidates(selected[0])], where)
        return _run(loaded, selected, where, {"budget_hours": budget_hours, "verify": verify}, debug=debug)
    if budget_hours is not None:
        raise UserError(f"--budget-hours has no effect with {given[0]}; remove it")
    from luffy.cli import study_view  # numpy and pyarrow: only when they are needed

    if plan:
        study_view.show_study_plan(loaded, selected, find_workspace(workspace), verify=verify)
    if collect:
        study_view.collect(loaded, find_workspace(workspace), verify=verify)
    if page:
        study_view.write_pages(loaded)
    return EXIT_OK


def _run(study: Sweep, cells: Sequence[str], where: Workspace, options: dict[str, object], *, debug: bool) -> int:
    parameters = {"config_file": str(study.path), "cells": list(cells), **options}
    return launch(FLOW, parameters, where, None, debug=debug)


def _names(option: str, text: str | None) -> list[str]:
    """The cells that an option names; none where it is not given."""
    names = [name.strip() for name in (text or "").split(",") if name.strip()]
    if text is not None and not names:
        raise UserError(f"{option} {text!r}: names no cell; give one or more, separated by commas")
    return names

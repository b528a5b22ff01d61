"""`luffy compare CONFIG`: methods under one budget, with several seeds."""

from collections.abc import Mapping
from functools import partial
from typing import Annotated

from typer import Argument

from luffy.cli.options import Debug, DryRun, Overrides, Verify, WorkspaceFolder, complete_config
from luffy.cli.planning import check, show_sweep_plan, sweep_plans
from luffy.config.many_runs.sweep_runs import Sweep, load_sweep
from luffy.errors import EXIT_OK
from luffy.flows.launch import launch
from luffy.pipeline.workspace import find_workspace

FLOW = "luffy.flows.run_sweep:run_sweep"
_Comparison = Annotated[
    str,
    Argument(
        metavar="CONFIG",
        help="YAML file of a comparison, or the name of a shipped one (compare_arithmetic)",
        autocompletion=complete_config,
        show_default=False,
    ),
]


def compare(
    config: _Comparison,
    overrides: Overrides = None,
    dry_run: DryRun = False,
    verify: Verify = False,
    workspace: WorkspaceFolder = None,
    debug: Debug = False,
) -> int:
    """Compare methods under one budget, with several seeds.

    What all arms share is made once. A failed run does not stop the others; the same command tries it again.
    """
    sweep, given = load_sweep(config, overrides or (), wanted="comparison"), {"overrides": overrides or []}
    return run_or_plan(sweep, {"config_file": config, **given}, workspace, dry_run=dry_run, verify=verify, debug=debug)


def run_or_plan(
    sweep: Sweep, parameters: Mapping[str, object], workspace: str | None, *, dry_run: bool, verify: bool, debug: bool
) -> int:
    """Run all of a comparison or a grid, whose flow takes `parameters`; or print its plan. Returns the exit code."""
    where = find_workspace(workspace)
    if dry_run:
        show_sweep_plan(sweep, where, verify=verify)
        return EXIT_OK
    check([each.config for each in sweep.candidates()], where)
    plans = partial(sweep_plans, sweep, where, verify=verify)
    return launch(FLOW, {**parameters, "verify": verify}, where, plans, debug=debug)

"""`luffy grid CONFIG`: one experiment over a grid of values, with several seeds."""

from functools import partial
from typing import Annotated

from typer import Argument, Option

from luffy.cli.options import Debug, DryRun, Overrides, Verify, WorkspaceFolder, complete_config
from luffy.cli.planning import check, grid_plans, show_grid_plan
from luffy.config.many_runs.grid_experiment import load_grid
from luffy.errors import EXIT_OK
from luffy.flows.launch import launch
from luffy.pipeline.workspace import find_workspace

_FLOW = "luffy.flows.run_grid:run_grid"
_Grid = Annotated[
    str,
    Argument(
        metavar="CONFIG",
        help="YAML file of a grid or of an experiment, or the name of a shipped one (grid_sft_size)",
        autocompletion=complete_config,
        show_default=False,
    ),
]


def grid(
    config: _Grid,
    overrides: Overrides = None,
    over: Annotated[
        list[str] | None,
        Option("--over", metavar="KEY.PATH=[VALUES]", help="for an experiment: values to try; may be repeated"),
    ] = None,
    seeds: Annotated[
        list[int] | None, Option("--seed", help="for an experiment: a seed of SFT and RL; may be repeated")
    ] = None,
    dry_run: DryRun = False,
    verify: Verify = False,
    workspace: WorkspaceFolder = None,
    debug: Debug = False,
) -> int:
    """Run one experiment over a grid of values, with several seeds.

    What points share is made once. A failed run does not stop the others; the same command tries it again.
    """
    loaded, where = load_grid(config, overrides or (), over or (), seeds or ()), find_workspace(workspace)
    if dry_run:
        show_grid_plan(loaded, where, verify=verify)
        return EXIT_OK
    check(loaded.experiments, where)
    parameters = {
        "config_file": config,
        "overrides": overrides or [],
        "over": over or [],
        "seeds": seeds or [],
        "verify": verify,
    }
    return launch(_FLOW, parameters, where, partial(grid_plans, loaded, where, verify=verify), debug=debug)

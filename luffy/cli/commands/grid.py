"""`luffy grid CONFIG`: one experiment over a grid of values, with several seeds."""

from typing import Annotated

from typer import Argument, Option

from luffy.cli.commands.compare import run_or_plan
from luffy.cli.options import Debug, DryRun, Overrides, Verify, WorkspaceFolder, complete_config
from luffy.config.many_runs.sweep_runs import load_sweep

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
    sweep = load_sweep(config, overrides or (), over or (), seeds or (), wanted="grid")
    given = {"overrides": overrides or [], "over": over or [], "seeds": seeds or []}
    return run_or_plan(sweep, {"config_file": config, **given}, workspace, dry_run=dry_run, verify=verify, debug=debug)

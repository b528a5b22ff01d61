"""`luffy compare CONFIG`: methods under one budget, or one experiment over a grid of values, with several seeds."""

from typing import Annotated

from typer import Option

from luffy.cli.options import Debug, DryRun, Overrides, Verify, WorkspaceFolder, config_argument
from luffy.cli.planning import check, show_sweep_plan
from luffy.config.load import FileKind
from luffy.config.many_runs.sweep_runs import kind_of_file, load_sweep
from luffy.errors import EXIT_OK
from luffy.flows.launch import launch
from luffy.pipeline.workspace import find_workspace

FLOW = "luffy.flows.run_sweep:run_sweep"
_HELP = "YAML file of a comparison, a grid or an experiment, or the name of a shipped one (compare_arithmetic)"


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
    dry_run: DryRun = False,
    verify: Verify = False,
    workspace: WorkspaceFolder = None,
    debug: Debug = False,
) -> int:
    """Compare methods under one budget, or the values of a grid, with several seeds.

    What runs share is made once. A failed run does not stop the others; the same command tries it again.
    """
    wanted: FileKind = "grid" if kind_of_file(config) in ("grid", "experiment") else "comparison"
    sweep = load_sweep(config, overrides or (), over or (), seeds or (), wanted=wanted)
    where = find_workspace(workspace)
    if dry_run:
        show_sweep_plan(sweep, where, verify=verify)
        return EXIT_OK
    check([each.config for each in sweep.candidates()], where)
    parameters = {"config_file": config, "overrides": overrides or [], "over": over or [], "seeds": seeds or []}
    return launch(FLOW, {**parameters, "verify": verify}, where, None, debug=debug)

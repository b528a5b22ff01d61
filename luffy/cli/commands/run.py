"""`luffy run` and `luffy plan`: one experiment, or its plan."""

from functools import partial
from typing import Annotated

from typer import BadParameter, Option

from luffy.cli.options import Config, Debug, DryRun, Overrides, Verify, WorkspaceFolder
from luffy.cli.planning import check, show_plan, show_sweep_plan
from luffy.config import load_experiment
from luffy.config.many_runs.sweep_runs import kind_of_file, load_sweep
from luffy.errors import EXIT_OK
from luffy.flows.launch import launch
from luffy.pipeline.experiment import open_experiment
from luffy.pipeline.graph import build_graph, select_nodes
from luffy.pipeline.workspace import find_workspace

Only = Annotated[
    list[str] | None,
    Option(metavar="STAGE", help="make this stage alone; those that it is made from have to be finished (repeatable)"),
]
Force = Annotated[
    list[str] | None,
    Option(metavar="STAGE", help="make this stage again from the beginning although it is finished (repeatable)"),
]
Adopt = Annotated[
    bool, Option("--adopt", help="take over results that other code has made, where nothing else differs; it is noted")
]


def run(
    config: Config,
    overrides: Overrides = None,
    dry_run: DryRun = False,
    verify: Verify = False,
    only: Only = None,
    force: Force = None,
    adopt: Adopt = False,
    workspace: WorkspaceFolder = None,
    debug: Debug = False,
) -> int:
    """Run an experiment from its data to its report.

    Finished stages are reused and an interrupted one resumes: repeat the command to continue.
    """
    where, experiment = find_workspace(workspace), load_experiment(config, overrides or ())
    nodes = build_graph(experiment)
    select_nodes(nodes, force or (), "--force")
    chosen = select_nodes(nodes, only or (), "--only")
    if dry_run:
        show_plan(experiment, where, verify=verify, only=chosen, adopts=adopt)
        return EXIT_OK
    check([experiment], where, nodes=[node for node in nodes if node.name in chosen] or None)
    parameters = {"config_file": config, "overrides": overrides or [], "verify": verify}
    parameters |= {"only": only, "force": force, "adopt": adopt}
    opened = partial(open_experiment, experiment, where, verify=verify)
    flow = "luffy.flows.full_pipeline:full_pipeline"
    return launch(flow, parameters, where, lambda: opened().plan(), debug=debug)


def plan(
    config: Config,
    overrides: Overrides = None,
    verify: Verify = False,
    adopt: Adopt = False,
    workspace: WorkspaceFolder = None,
    debug: Debug = False,
) -> int:
    """What a run would do with each stage, and why; also of a comparison, a grid or a study."""
    where = find_workspace(workspace)
    if kind_of_file(config) != "experiment":
        if adopt:
            raise BadParameter("a comparison adopts nothing; plan one of its runs", param_hint="--adopt")
        sweep = load_sweep(config, overrides or ())
        show_sweep_plan(sweep, where, sweep.selected(()), verify=verify)
    else:
        show_plan(load_experiment(config, overrides or ()), where, verify=verify, adopts=adopt)
    return EXIT_OK

"""`luffy run CONFIG`: an experiment from its data to its report."""

from typing import Annotated

from typer import Option

from luffy.cli.options import Config, Debug, DryRun, Overrides, Verify, WorkspaceFolder
from luffy.cli.start import StartOptions, start_experiment
from luffy.config import load_experiment
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
_FLOW = "luffy.flows.full_pipeline:full_pipeline"


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
    options = StartOptions(find_workspace(workspace), dry_run, verify, debug)
    experiment = load_experiment(config, overrides or ())
    nodes = build_graph(experiment)
    select_nodes(nodes, force or (), "--force")
    chosen = select_nodes(nodes, only or (), "--only")
    stages = [node.stage for node in nodes if node.name in chosen] or None
    parameters = {"config_file": config, "overrides": overrides or [], "only": only, "force": force, "adopt": adopt}
    return start_experiment(_FLOW, experiment, parameters, options, stages=stages)

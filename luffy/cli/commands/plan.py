"""`luffy plan CONFIG`: what a run would do with each stage, and why."""

from luffy.cli.options import Config, Debug, Overrides, Verify, WorkspaceFolder
from luffy.cli.planning import show_plan, show_sweep_plan
from luffy.config import load_experiment
from luffy.config.many_runs.sweep_runs import kind_of_file, load_sweep
from luffy.errors import EXIT_OK
from luffy.pipeline.workspace import find_workspace


def plan(
    config: Config,
    overrides: Overrides = None,
    verify: Verify = False,
    workspace: WorkspaceFolder = None,
    debug: Debug = False,
) -> int:
    """What a run would do with each stage, and why; also of a comparison or a grid."""
    where = find_workspace(workspace)
    if kind_of_file(config) in ("comparison", "grid"):
        show_sweep_plan(load_sweep(config, overrides or ()), where, verify=verify)
    else:
        show_plan(load_experiment(config, overrides or ()), where, verify=verify)
    return EXIT_OK

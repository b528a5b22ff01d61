"""`luffy plan CONFIG`: what a run would do with each stage, and why."""

from luffy.cli.options import Config, Debug, Overrides, Verify, WorkspaceFolder
from luffy.cli.planning import show_comparison_plan, show_grid_plan, show_plan
from luffy.config import load_experiment
from luffy.config.many_runs.comparison import is_comparison, load_comparison
from luffy.config.many_runs.grid_experiment import is_grid, load_grid
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
    if is_comparison(config):
        show_comparison_plan(load_comparison(config, overrides or ()), where, verify=verify)
    elif is_grid(config):
        show_grid_plan(load_grid(config, overrides or ()), where, verify=verify)
    else:
        show_plan(load_experiment(config, overrides or ()), where, verify=verify)
    return EXIT_OK

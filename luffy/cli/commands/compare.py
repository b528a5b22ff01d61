"""`luffy compare CONFIG`: methods under one budget, with several seeds."""

from functools import partial
from typing import Annotated

from typer import Argument

from luffy.cli.options import Debug, DryRun, Overrides, Verify, WorkspaceFolder, complete_config
from luffy.cli.planning import arm_configs, check, comparison_plans, show_comparison_plan
from luffy.config.many_runs.comparison import load_comparison
from luffy.errors import EXIT_OK
from luffy.flows.launch import launch
from luffy.pipeline.workspace import find_workspace

_FLOW = "luffy.flows.compare_methods:compare_methods"
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
    comparison, where = load_comparison(config, overrides or ()), find_workspace(workspace)
    if dry_run:
        show_comparison_plan(comparison, where, verify=verify)
        return EXIT_OK
    check(arm_configs(comparison), where)
    parameters = {"config_file": config, "overrides": overrides or [], "verify": verify}
    return launch(_FLOW, parameters, where, partial(comparison_plans, comparison, where, verify=verify), debug=debug)

"""`luffy prepare CONFIG`: the data of an experiment alone."""

from luffy.cli.options import Config, Debug, DryRun, Overrides, Verify, WorkspaceFolder
from luffy.cli.start import StartOptions, start_experiment
from luffy.config import load_experiment
from luffy.config.derived import data_alone
from luffy.pipeline.workspace import find_workspace

_FLOW = "luffy.flows.prepare_data:prepare_data_alone"


def prepare(
    config: Config,
    overrides: Overrides = None,
    dry_run: DryRun = False,
    verify: Verify = False,
    workspace: WorkspaceFolder = None,
    debug: Debug = False,
) -> int:
    """Prepare the data of an experiment alone.

    Sources are read, graded, filtered and split. A run of the same experiment reuses the result.
    """
    options = StartOptions(find_workspace(workspace), dry_run, verify, debug)
    parameters = {"config_file": config, "overrides": overrides or []}
    return start_experiment(_FLOW, data_alone(load_experiment(config, overrides or ())), parameters, options)

"""`luffy run CONFIG`: an experiment from its data to its report."""

from luffy.cli.options import Config, Debug, DryRun, Overrides, Verify, WorkspaceFolder
from luffy.cli.start import StartOptions, start_experiment
from luffy.config import load_experiment
from luffy.pipeline.workspace import find_workspace

_FLOW = "luffy.flows.full_pipeline:full_pipeline"


def run(
    config: Config,
    overrides: Overrides = None,
    dry_run: DryRun = False,
    verify: Verify = False,
    workspace: WorkspaceFolder = None,
    debug: Debug = False,
) -> int:
    """Run an experiment from its data to its report.

    Finished stages are reused and an interrupted one resumes: repeat the command to continue.
    """
    options = StartOptions(find_workspace(workspace), dry_run, verify, debug)
    parameters = {"config_file": config, "overrides": overrides or []}
    return start_experiment(_FLOW, load_experiment(config, overrides or ()), parameters, options)

"""`luffy doctor [CONFIG]`: whether this machine can run experiments, with the remedy beside every finding."""

from typing import Annotated

from typer import Argument, Option

from luffy.cli.console import say
from luffy.cli.options import Debug, WorkspaceFolder, complete_config
from luffy.errors import EXIT_FAILURE, EXIT_OK
from luffy.pipeline.workspace import find_workspace


def doctor(
    config: Annotated[
        str | None,
        Argument(
            help="an experiment whose API keys are also checked", autocompletion=complete_config, show_default=False
        ),
    ] = None,
    no_run: Annotated[bool, Option("--no-run", help="leave out the tiny run from data to an RL step")] = False,
    workspace: WorkspaceFolder = None,
    debug: Debug = False,
) -> int:
    """Check this machine: versions, GPUs, vLLM, sandbox, disk, Prefect, and a tiny run.

    Prints the remedy beside every finding. Exit code 1 if something is broken.
    """
    from luffy.cli.checkup import check_everything  # loads much that no other command needs

    worst = EXIT_OK
    for finding in check_everything(find_workspace(workspace), config, no_run=no_run):
        say(f"{finding.severity:<7} {finding.check:<14} {finding.found}")
        if finding.remedy:
            say(f"{'':<22} -> {finding.remedy}")
        if finding.severity == "broken":
            worst = EXIT_FAILURE
    return worst

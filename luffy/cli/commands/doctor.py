"""`luffy doctor [CONFIG]`: whether this machine can run experiments, with the remedy beside every finding."""

import importlib.metadata
import os
from collections.abc import Iterator
from typing import Annotated

from typer import Argument, Option

from luffy.cli.checkup.finding import Finding, broken
from luffy.cli.console import say
from luffy.cli.options import Debug, WorkspaceFolder, complete_config
from luffy.errors import EXIT_FAILURE, EXIT_OK, ConfigError
from luffy.pipeline.workspace import Workspace, find_workspace

_SERVE_PORT = 4200
_TIMEOUT_S = 5.0


def doctor(
    config: Annotated[
        str | None,
        Argument(
            help="an experiment whose API keys are also checked",
            autocompletion=complete_config,
            show_default=False,
        ),
    ] = None,
    no_run: Annotated[bool, Option("--no-run", help="leave out the tiny run from data to an RL step")] = False,
    workspace: WorkspaceFolder = None,
    debug: Debug = False,
) -> int:
    """Check this machine: versions, GPUs, vLLM, sandbox, disk, ports, clock, Prefect, and a tiny run.

    Prints the remedy beside every finding. Exit code 1 if something is broken.
    """
    worst = EXIT_OK
    for finding in _findings(find_workspace(workspace), config, no_run=no_run):
        say(f"{finding.severity:<7} {finding.check:<14} {finding.found}")
        if finding.remedy:
            say(f"{'':<22} -> {finding.remedy}")
        if finding.severity == "broken":
            worst = EXIT_FAILURE
    return worst


def _distribution() -> Iterator[Finding]:
    from luffy.cli.checkup.software_checks import DISTRIBUTION, check_packages, check_python

    try:
        metadata = importlib.metadata.metadata(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        yield broken("packages", f"{DISTRIBUTION} is not installed in this environment", "pip install -e .")
        return
    yield check_python(metadata["Requires-Python"])
    yield check_packages(importlib.metadata.requires(DISTRIBUTION) or [])


def _findings(workspace: Workspace, config: str | None, *, no_run: bool) -> Iterator[Finding]:
    from luffy.cli.checkup import machine_checks, software_checks, trial_run
    from luffy.config import load_experiment
    from luffy.flows.prefect_api import answers, configured_api
    from luffy.pipeline.gpus import Gpu, detected_gpus

    experiment = None if config is None else load_experiment(config)  # a mistake in it ends the command at once
    yield from _distribution()
    if (constraints := software_checks.check_constraints()) is not None:
        yield constraints
    yield from machine_checks.check_variables()
    gpus: tuple[Gpu, ...] | None = ()
    try:
        yield software_checks.check_gpus(gpus := detected_gpus())
    except ConfigError as error:
        found, _, remedy = str(error).rpartition("; ")
        yield broken("gpus", found, remedy)
    yield software_checks.check_vllm(has_gpu=bool(gpus))
    yield software_checks.check_sandbox()
    yield machine_checks.check_workspace(workspace)
    yield machine_checks.check_shared_memory()
    yield machine_checks.check_open_files()
    yield machine_checks.check_clock(workspace)
    os.environ.setdefault("PREFECT_HOME", str(workspace.prefect_home))
    yield machine_checks.check_ports(_SERVE_PORT, lambda url: answers(url, _TIMEOUT_S))
    yield machine_checks.check_prefect(configured_api(), lambda url: answers(url, _TIMEOUT_S))
    if experiment is not None:
        yield from machine_checks.check_keys(experiment)
    if not no_run:
        yield trial_run.trial_run()

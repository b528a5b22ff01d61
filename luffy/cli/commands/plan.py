"""`python -m luffy plan CONFIG`: what a run would do with each stage, and why."""

import argparse

from luffy.cli.console import memory_table, plan_table, say, terminal
from luffy.config import ExperimentConfig, load_experiment
from luffy.errors import EXIT_OK, ConfigError
from luffy.pipeline.experiment import open_experiment
from luffy.pipeline.resources import find_resources
from luffy.pipeline.workspace import Workspace, find_workspace

HELP = "what a run would do with each stage, and why"


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", help="an experiment's YAML")
    parser.add_argument("overrides", nargs="*", metavar="key.path=value", help="fields to override")
    parser.add_argument("--verify", action="store_true", help="compare full hashes of all outputs")


def run(options: argparse.Namespace) -> int:
    config = load_experiment(options.config, options.overrides)
    return show_plan_of(config, find_workspace(options.workspace), verify=options.verify)


def show_plan_of(
    config: ExperimentConfig, workspace: Workspace, *, verify: bool, sweep_steps: tuple[int, ...] = ()
) -> int:
    """Print what a run would do with each stage, and why; under `cluster: ray` first what its GPUs would hold.

    Raises ConfigError, after the estimate, where that cannot fit.
    """
    show_resources(config, estimate=True)
    experiment = open_experiment(config, workspace, verify=verify, sweep_steps=sweep_steps)
    console = terminal()
    if config.cluster == "ray":
        console.print()
    say(f"workspace {workspace.root}")
    console.print(plan_table(experiment.plan()))
    return EXIT_OK


def show_resources(config: ExperimentConfig, *, estimate: bool) -> None:
    """Print what a run under `cluster: ray` asks of its machines, with or without the `estimate` of each GPU's memory.

    Raises ConfigError, a line a mistake, where they do not have it.
    """
    resources = find_resources(config)
    console = terminal()
    for gpu in resources.gpus if estimate else ():
        console.print(memory_table(gpu))
        console.print()
    for note in resources.notes:
        say(note)
    if resources.complaints:
        raise ConfigError("\n".join(resources.complaints))

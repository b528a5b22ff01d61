"""`luffy bench CONFIG`: what a run will cost, measured by a few steps of its stages."""

from typing import Annotated

from typer import Option

from luffy.cli.options import Config, Debug, Overrides, WorkspaceFolder
from luffy.config import load_experiment
from luffy.errors import EXIT_FAILURE, EXIT_OK
from luffy.pipeline.workspace import find_workspace


def bench(
    config: Config,
    overrides: Overrides = None,
    steps: Annotated[
        int, Option(min=2, help="RL steps to measure after the first; SFT and base take twice as many")
    ] = 4,
    response_tokens: Annotated[
        float | None, Option(min=1, help="mean response length [from earlier runs, else measured with the policy]")
    ] = None,
    layouts: Annotated[bool, Option("--layouts", help="also try other placements, and name the fastest")] = False,
    workspace: WorkspaceFolder = None,
    debug: Debug = False,
) -> int:
    """Measure what a run will cost, by a few steps of its stages.

    Prints speeds, memory, and the predicted time of every stage. Prepares data and policy first where that takes no
    download and no training; the run reuses both.
    """
    from luffy.cli.benching import run_bench
    from luffy.costs.bench_run import BenchOptions

    experiment = load_experiment(config, overrides or ())
    options = BenchOptions(steps, response_tokens)
    complete = run_bench(experiment, find_workspace(workspace), options, layouts=layouts)
    return EXIT_OK if complete else EXIT_FAILURE

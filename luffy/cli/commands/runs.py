"""`python -m luffy runs`: what a workspace holds."""

import argparse

from luffy.cli.console import say, text_table, wide_terminal
from luffy.cli.inventory import RUN_HEADER, STAGE_HEADER, take_stock
from luffy.errors import EXIT_OK
from luffy.pipeline.workspace import find_workspace

HELP = "experiments and stage results in the workspace, with state, age and size"


def add(parser: argparse.ArgumentParser) -> None:
    """Nothing of its own."""


def run(options: argparse.Namespace) -> int:
    workspace = find_workspace(options.workspace)
    console = wide_terminal()
    say(f"workspace {workspace.root}")
    runs, stages = take_stock(workspace)
    console.print(text_table(RUN_HEADER, runs, title="Runs"))
    console.print()
    console.print(text_table(STAGE_HEADER, stages, title="Stage results"))
    return EXIT_OK

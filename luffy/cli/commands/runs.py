"""`python -m luffy runs`: what a workspace holds."""

import argparse

from luffy.cli.console import say, terminal, text_table
from luffy.cli.inventory import list_runs, list_stages
from luffy.errors import EXIT_OK
from luffy.pipeline.workspace import find_workspace

HELP = "experiments and stage results in the workspace"


def add(parser: argparse.ArgumentParser) -> None:
    """Nothing of its own."""


def run(options: argparse.Namespace) -> int:
    workspace = find_workspace(options.workspace)
    console = terminal()
    say(f"workspace {workspace.root}")
    console.print(text_table(["run", "state", "age", "stages"], list_runs(workspace), title="Runs"))
    console.print()
    header = ["stage", "key", "state", "age", "size", "used by"]
    console.print(text_table(header, list_stages(workspace), title="Stage results"))
    return EXIT_OK

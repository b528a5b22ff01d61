"""`python -m luffy leaderboard`: every evaluated model of a workspace."""

import argparse

from luffy.errors import EXIT_OK
from luffy.pipeline.workspace import find_workspace

HELP = "every evaluated model by suite, with intervals; also as a page"


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder_of_results", nargs="?", metavar="workspace", help="as --workspace")


def run(options: argparse.Namespace) -> int:
    from luffy.cli.leaderboard import show_leaderboard, write_leaderboard  # plots: only when they are needed

    workspace = find_workspace(options.folder_of_results or options.workspace)
    show_leaderboard(write_leaderboard(workspace), workspace.root)
    return EXIT_OK

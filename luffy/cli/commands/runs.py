"""`luffy runs`: what a workspace holds."""

from luffy.cli.console import say, text_table, wide_terminal
from luffy.cli.inventory import RUN_HEADER, STAGE_HEADER, take_stock
from luffy.cli.options import Debug, WorkspaceFolder
from luffy.errors import EXIT_OK
from luffy.pipeline.workspace import find_workspace


def runs(workspace: WorkspaceFolder = None, debug: Debug = False) -> int:
    """List runs and stage results in the workspace, with state, age and size."""
    where = find_workspace(workspace)
    console = wide_terminal()
    say(f"workspace {where.root}")
    found, stages = take_stock(where)
    console.print(text_table(RUN_HEADER, found, title="Runs"))
    console.print()
    console.print(text_table(STAGE_HEADER, stages, title="Stage results"))
    return EXIT_OK

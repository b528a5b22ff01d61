"""`luffy leaderboard`: every evaluated model of a workspace."""

from typing import Annotated

from typer import Argument

from luffy.cli.options import Debug, WorkspaceFolder
from luffy.errors import EXIT_OK, UserError
from luffy.pipeline.workspace import find_workspace


def leaderboard(
    folder: Annotated[str | None, Argument(metavar="[DIR]", help="the same as --workspace", show_default=False)] = None,
    workspace: WorkspaceFolder = None,
    debug: Debug = False,
) -> int:
    """Rank every evaluated model by suite, with intervals; also as a page."""
    from luffy.cli.leaderboard_view import show_leaderboard, write_leaderboard  # plots: only when they are needed

    if folder is not None and workspace is not None:
        raise UserError("DIR and --workspace both name the workspace: give one of them")
    where = find_workspace(folder or workspace)
    show_leaderboard(write_leaderboard(where), where.root)
    return EXIT_OK

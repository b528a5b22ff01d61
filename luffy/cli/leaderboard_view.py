"""`luffy show --leaderboard`: every evaluated model of a workspace, as text, as a page and as data."""

from pathlib import Path

from luffy.cli.console import terminal, text_table
from luffy.errors import DataError
from luffy.evaluation.across_runs.board import Board, BoardTable, board_json, build_board, read_entries
from luffy.evaluation.across_runs.published import read_published
from luffy.files import write_atomic
from luffy.pipeline.workspace import Workspace
from luffy.report import leaderboard_page as page
from luffy.report.page import html

HTML_FILE = "leaderboard.html"
JSON_FILE = "leaderboard.json"


def write_leaderboard(workspace: Workspace) -> Board:
    """Write the page and the data into the workspace; returns what they show.

    Raises DataError when the workspace has no finished evaluation.
    """
    if not workspace.root.is_dir():
        raise DataError(f"workspace {workspace.root}: no such folder; give another with --workspace")
    entries, left_out = read_entries(workspace)
    board = build_board(entries, read_published(), left_out)
    write_atomic(workspace.root / HTML_FILE, html(page.leaderboard_page(board, str(workspace.root))))
    write_atomic(workspace.root / JSON_FILE, board_json(board))
    return board


def show_leaderboard(board: Board, folder: Path) -> None:
    """Print the tables, and where the page is."""
    for table in board.tables:
        _show(table)
    console = terminal()
    for item in board.left_out:
        console.print(f"left out: {item.directory}: {item.reason}", markup=False, soft_wrap=True)
    console.print(
        f"Accuracy in % with its interval over problems. {page.MARK}: clearly better than the next row on that suite "
        "(paired over problems, Holm's correction over suites); without it the first ones are not distinguishable.",
        markup=False,
        soft_wrap=True,
    )
    console.print(f"leaderboard: {folder / HTML_FILE}", markup=False, soft_wrap=True)


def _show(table: BoardTable) -> None:
    title = f"{page.title(table)}; {page.confidence(table)} intervals" + (f" ({table.note})" if table.note else "")
    shown, console = page.accuracy_table(table), terminal()
    rows = [["\n".join((cell.text, *cell.details)) for cell in row] for row in shown.rows]
    console.print(title, markup=False, soft_wrap=True, style="bold")
    console.print(text_table(shown.header, rows))
    for paper in page.published_of(table):
        console.print(f"{page.PUBLISHED}: {page.about(paper)}", markup=False, soft_wrap=True)
    console.print()

"""`luffy show --leaderboard`: every evaluated model of a workspace, as text, as a page and as data."""

from luffy.cli.console import say, terminal, text_table
from luffy.errors import DataError
from luffy.evaluation.across_runs.board import board_json, build_board, read_entries
from luffy.evaluation.across_runs.published import read_published
from luffy.files import write_atomic
from luffy.pipeline.workspace import Workspace
from luffy.report.leaderboard_page import MARK, PUBLISHED, about, leaderboard_page, published_of
from luffy.report.page import html


def show_leaderboard(workspace: Workspace) -> None:
    """Write the page and the data into the workspace, and print the tables and where the page is.

    Raises DataError when the workspace has no finished evaluation.
    """
    if not workspace.root.is_dir():
        raise DataError(f"workspace {workspace.root}: no such folder; give another with --workspace")
    entries, left_out = read_entries(workspace)
    board = build_board(entries, read_published(), left_out)
    file = workspace.root / "leaderboard.html"
    page = leaderboard_page(board, str(workspace.root))
    write_atomic(file, html(page))
    write_atomic(workspace.root / "leaderboard.json", board_json(board))
    console = terminal()
    for table, section in zip(board.tables, page.sections[1:], strict=False):
        (accuracies,) = section.tables
        title = f"{section.title}; {section.aside}" + (f" ({table.note})" if table.note else "")
        console.print(title, markup=False, soft_wrap=True, style="bold")
        rows = [["\n".join((cell.text, *cell.details)) for cell in row] for row in accuracies.rows]
        console.print(text_table(accuracies.header, rows))
        for paper in published_of(table):
            say(f"{PUBLISHED}: {about(paper)}")
        console.print()
    for item in board.left_out:
        say(f"left out: {item.directory}: {item.reason}")
    say(
        f"Accuracy in % with its interval over problems. {MARK}: clearly better than the next row on that suite "
        "(paired over problems, Holm's correction over suites); without it the first ones are not distinguishable."
    )
    say(f"leaderboard: {file}")

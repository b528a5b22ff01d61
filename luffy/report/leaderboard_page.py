"""The leaderboard for people: rows of text for a terminal, and one HTML file that needs nothing else."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle

from luffy.evaluation.leaderboard.board import Board, BoardTable, Lead, Reference
from luffy.evaluation.leaderboard.entries import Column, Entry
from luffy.evaluation.leaderboard.published import PublishedTable
from luffy.report import wording
from luffy.report.plotter import Dot, dot_plot
from luffy.report.rendering import render
from luffy.report.tables import Table, TableCell

MARK = "★"
PUBLISHED = "published"
_NONE = "–"
_NAME_HEADER = ("checkpoint", "method", "experiment")
_COLORS = ("c1", "c2", "c3", "c4", "c5", "c7", "c6")


@dataclass(frozen=True, slots=True)
class LeaderboardSection:
    """One protocol's table as the page shows it."""

    title: str
    confidence: str
    methods: str
    """Names of the intervals' methods."""
    note: str
    table: Table
    num_own: int
    """Number of rows from this workspace; the others are published."""
    papers: tuple[PublishedTable, ...]
    leads: Table | None
    dots: str
    legend: tuple[tuple[str, str], ...]


def render_page(board: Board, workspace: str) -> str:
    """The HTML page; `workspace` is its title."""
    sections = [_section(number, table) for number, table in enumerate(board.tables)]
    return render(
        "leaderboard.html.jinja",
        workspace=workspace,
        mark=MARK,
        about=about,
        sections=sections,
        board=board,
        published=list(map(_published, board.published)),
    )


def title(table: BoardTable) -> str:
    """The protocol in words."""
    return f"{table.protocol.text[0].upper()}{table.protocol.text[1:]}"


def confidence(table: BoardTable) -> str:
    """The level of its intervals."""
    return f"{100 * table.confidence:g} %"


def accuracy_table(table: BoardTable) -> Table:
    """One row per model: its name, then its accuracy on each suite, marked where it is clearly the best.

    Published rows follow, named as such.
    """
    mean = ("mean",) if _has_mean(table) else ()
    header = (*_NAME_HEADER, *(_heading(table, column) for column in table.columns), *mean)
    rows = [(*_name_cells(entry), *_accuracies(table, entry)) for entry in table.rows]
    rows += [(*_reference_row(table, reference), *(TableCell("") for _ in mean)) for reference in table.references]
    return Table(header, tuple(rows))


def lead_table(table: BoardTable) -> Table | None:
    """The best against the next on each suite, in percentage points; None where no suite has two rows."""
    header = ("suite", "best", "next", "difference", "verdict")
    rows = tuple(_lead_row(table, column, lead) for column, lead in table.leads.items())
    return Table(header, rows) if rows else None


def about(paper: PublishedTable) -> str:
    """Where published rows come from, and how they were found."""
    return f"{paper.title} ({paper.source}), {paper.model}: {paper.protocol}; without intervals, not compared by a test"


def published_of(table: BoardTable) -> list[PublishedTable]:
    """The papers whose published rows are shown with the table."""
    papers: list[PublishedTable] = []
    for reference in table.references:
        if reference.table not in papers:
            papers.append(reference.table)
    return papers


def _section(number: int, table: BoardTable) -> LeaderboardSection:
    colors = list(zip(table.rows, cycle(_COLORS), strict=False))
    few = len(table.rows) <= len(_COLORS)
    bands = [(column.suite, _dots(column, colors)) for column in table.columns]
    return LeaderboardSection(
        title=title(table),
        confidence=confidence(table),
        methods="; ".join(_methods(table)),
        note=table.note,
        table=accuracy_table(table),
        num_own=len(table.rows),
        papers=tuple(published_of(table)),
        leads=lead_table(table),
        dots=dot_plot(f"leaderboard-{number}", bands) if few else "",
        legend=tuple((color, entry.name.text) for entry, color in colors) if few else (),
    )


def _methods(table: BoardTable) -> list[str]:
    found = dict.fromkeys(cell.row.method for entry in table.rows for cell in entry.cells.values())
    return [method for method in found if method]


def _dots(column: Column, colors: Sequence[tuple[Entry, str]]) -> list[Dot]:
    cells = ((entry.cells[column].row, color) for entry, color in colors if column in entry.cells)
    return [Dot(color, row.accuracy, *row.interval) for row, color in cells]


def _heading(table: BoardTable, column: Column) -> str:
    """Heading of a column: the suite, its distinguishing settings, its problems and the responses to each."""
    alike = [
        other
        for other in table.columns
        if (other.suite, other.num_problems, other.num_samples)
        == (column.suite, column.num_problems, column.num_samples)
    ]
    mark = f" #{column.problems[:4]}" if len(alike) > 1 else ""
    return f"{column.suite}{mark}\n{column.num_problems:,} × {column.num_samples}"


def _name_cells(entry: Entry) -> tuple[TableCell, ...]:
    name = entry.name
    variant = (name.variant,) if name.variant else ()
    return TableCell(name.checkpoint, variant), TableCell(name.method or _NONE), TableCell(name.experiment or _NONE)


def _accuracies(table: BoardTable, entry: Entry) -> list[TableCell]:
    cells = [_accuracy_cell(table, entry, column) for column in table.columns]
    if not _has_mean(table):
        return cells
    mean = table.mean(entry)
    if mean is None:
        return [*cells, TableCell(_NONE)]
    return [*cells, TableCell(wording.percent(mean.value), (wording.interval(*mean.interval),))]


def _accuracy_cell(table: BoardTable, entry: Entry, column: Column) -> TableCell:
    cell, lead = entry.cells.get(column), table.leads.get(column)
    if cell is None:
        return TableCell(_NONE)
    best = lead is not None and lead.best is entry and lead.is_clear
    text = wording.percent(cell.row.accuracy) + (f" {MARK}" if best else "")
    return TableCell(text, (wording.interval(*cell.row.interval),), "better" if best else "")


def _has_mean(table: BoardTable) -> bool:
    return any(table.mean(entry) is not None for entry in table.rows)


def _reference_row(table: BoardTable, reference: Reference) -> tuple[TableCell, ...]:
    accuracies = (reference.accuracies.get(column) for column in table.columns)
    cells = (TableCell(_NONE if value is None else wording.percent(value)) for value in accuracies)
    return TableCell(reference.row.name), TableCell(PUBLISHED), TableCell(reference.table.source), *cells


def _lead_row(table: BoardTable, column: Column, lead: Lead) -> tuple[TableCell, ...]:
    difference = lead.comparison.paired
    counts = f"{difference.wins} better, {difference.losses} worse, {difference.ties} same"
    verdict = f"{MARK} clearly better" if lead.is_clear else "not distinguishable"
    return (
        TableCell(_heading(table, column).partition("\n")[0]),
        TableCell(lead.best.name.text),
        TableCell(lead.next.name.text),
        TableCell(wording.signed(difference.difference.value), (wording.signed_interval(difference), counts)),
        TableCell(verdict, (wording.adjusted_p(lead.comparison),), "better" if lead.is_clear else ""),
    )


def _published(table: PublishedTable) -> tuple[PublishedTable, Table]:
    """A paper's whole table."""
    header = (table.model, *(benchmark.label for benchmark in table.benchmarks.values()))
    rows = (
        (
            TableCell(row.name),
            *(
                TableCell(f"{row.accuracies[name]:.1f}" if name in row.accuracies else _NONE)
                for name in table.benchmarks
            ),
        )
        for row in table.rows
    )
    return table, Table(header, tuple(rows))

"""The leaderboard for people: rows of text for a terminal, and one HTML file that needs nothing else."""

from itertools import cycle

from luffy.evaluation.across_runs.all_results import Column, Leaderboard, ProtocolTable, PublishedTable
from luffy.report.cells import NONE, Table, TableCell, accuracy, counts, difference, p_value, percent
from luffy.report.cells import table as shown_table
from luffy.report.evaluation_page import accuracy_figure
from luffy.report.page import Figure, Page, Section

MARK = "★"
PUBLISHED = "published"
_NAME_HEADER = ("checkpoint", "method", "run")
_COLORS = ("c1", "c2", "c3", "c4", "c5", "c7", "c6")


def leaderboard_page(board: Leaderboard, workspace: str) -> Page:
    """A section for each protocol, then the published tables, and what was left out."""
    note = (
        "Accuracy in percent, mean over all responses, with its interval over problems: what another set of problems "
        "of the same kind would give. Under a suite's name: its problems × responses to each. "
        f"{MARK} marks the best row of a suite where it is clearly better than the next one (a test of their "
        "difference on the same problems, corrected after Holm for the number of suites); where no row is marked, the "
        "first ones cannot be told apart. Rows are compared within a table only, since a table is one protocol. The "
        "best mean stands first; means are not tested."
    )
    sections = [Section(notes=(note,)), *map(_section, board.tables)]
    for paper in board.published:
        rows = (
            (row.name, *(f"{row.accuracies[key]:.1f}" if key in row.accuracies else NONE for key in paper.benchmarks))
            for row in paper.rows
        )
        sections.append(
            Section(
                title="Published results",
                aside=f"{paper.title}, {paper.source}",
                notes=(f"{about(paper)}. They stand in a table above where its suites are the same benchmarks.",),
                tables=(shown_table((paper.model, *(each.label for each in paper.benchmarks.values())), rows),),
            )
        )
    if board.left_out:
        left_out = (f"{directory.name}: {reason}" for directory, reason in board.left_out.items())
        sections.append(Section(title="Left out", notes=tuple(left_out)))
    return Page("Leaderboard", f"workspace {workspace}", tuple(sections), workspace)


def accuracy_table(table: ProtocolTable) -> Table:
    """One row per model: its name, then its accuracy on each suite, marked where it is clearly the best.

    Published rows follow, named as such.
    """
    means = [table.mean(each) for each in table.rows]
    has_means = any(means)
    header = (*_NAME_HEADER, *(_heading(table, column) for column in table.columns), *(["mean"] if has_means else []))
    rows = []
    for each, mean in zip(table.rows, means, strict=True):
        model = each.model
        more = (f"and {len(model.runs) - 1} more",) if len(model.runs) > 1 else ()
        row = [TableCell(model.checkpoint), TableCell(model.method or NONE), TableCell(model.run, more)]
        for column in table.columns:
            found, lead = each.cells.get(column), table.leads.get(column)
            cell = accuracy(None if found is None else found.row.estimate)
            is_best = lead is not None and lead.best is each and lead.is_clear
            row.append(TableCell(f"{cell.text} {MARK}", cell.details, "better") if is_best else cell)
        rows.append((*row, *([accuracy(mean)] if has_means else [])))
    for published in table.references:
        accuracies = (percent(published.accuracies.get(column)) for column in table.columns)
        texts = (published.row.name, PUBLISHED, published.table.source, *accuracies, *([""] if has_means else []))
        rows.append(tuple(TableCell(text, (), "aside") for text in texts))
    return Table(header, tuple(rows), style="numbers board")


def about(paper: PublishedTable) -> str:
    """Where published rows come from, and how they were found."""
    return f"{paper.title} ({paper.source}), {paper.model}: {paper.protocol}; without intervals, not compared by a test"


def published_of(table: ProtocolTable) -> list[PublishedTable]:
    """The papers whose published rows are shown with the table."""
    papers = [reference.table for reference in table.references]
    return [paper for index, paper in enumerate(papers) if paper not in papers[:index]]


def _section(table: ProtocolTable) -> Section:
    methods = dict.fromkeys(found.row.method for each in table.rows for found in each.cells.values())
    notes = (
        f"Here {table.note}." if table.note else "",
        *(f"Published: {about(paper)}." for paper in published_of(table)),
        f"Intervals: {'; '.join(filter(None, methods))}." if any(methods) else "",
    )
    figures, colors = list[Figure](), list(zip(table.rows, cycle(_COLORS), strict=False))
    if len(table.rows) <= len(_COLORS):
        bands = [
            (column.suite, [(c, each.cells[column].row.estimate, ()) for each, c in colors if column in each.cells])
            for column in table.columns
        ]
        legend = tuple((color, each.model.text) for each, color in colors)
        figures.append(accuracy_figure(bands, legend))
    leads = []
    for column, lead in table.leads.items():
        found, p = lead.comparison.paired, p_value(lead.comparison.adjusted_p)
        verdict = TableCell(f"{MARK} clearly better", (p,), "better")
        leads.append(
            (
                _heading(table, column).partition("\n")[0],
                lead.best.model.text,
                lead.next.model.text,
                difference(found.difference, notes=(counts(found),)),
                verdict if lead.is_clear else TableCell("not distinguishable", (p,)),
            )
        )
    compared = shown_table(
        ("suite", "best", "next", "difference", "verdict"),
        leads,
        note="Percentage points with their interval, and the number of problems on which the best was right more or "
        "less often. p-values after Holm's correction over the table's suites.",
    )
    folded = Section(title="The best against the next on each suite", is_folded=True, tables=(compared,))
    return Section(
        title=table.title,
        aside=f"{100 * table.confidence:g} % intervals",
        notes=tuple(filter(None, notes)),
        tables=(accuracy_table(table),),
        sections=(Section(figures=tuple(figures)), *([folded] if leads else [])),
    )


def _heading(table: ProtocolTable, column: Column) -> str:
    """Heading of a column: the suite, its distinguishing settings, its problems and the responses to each."""
    alike = [
        other
        for other in table.columns
        if (other.suite, other.num_problems, other.num_samples)
        == (column.suite, column.num_problems, column.num_samples)
    ]
    mark = f" #{column.problems[:4]}" if len(alike) > 1 else ""
    return f"{column.suite}{mark}\n{column.num_problems:,} × {column.num_samples}"

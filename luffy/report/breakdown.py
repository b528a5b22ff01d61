"""Accuracy by subject and level: a table and a plot with intervals, of one model or of several beside each other."""

from collections.abc import Sequence
from dataclasses import dataclass

from luffy.evaluation.results import Breakdown, ResultRow
from luffy.report import wording
from luffy.report.evaluation_tables import breakdowns
from luffy.report.plotter import Dot, dot_plot
from luffy.report.tables import Table, TableCell


@dataclass(frozen=True, slots=True)
class Scored:
    """A model's row, and how the page calls and colours the model."""

    name: str
    color: str
    row: ResultRow


@dataclass(frozen=True, slots=True)
class BreakdownSection:
    """One suite by one kind of label."""

    title: str
    table: Table
    dots: str


def breakdown_sections(figure: str, scored: Sequence[Scored]) -> list[BreakdownSection]:
    """The sections of one suite under one decoding; `figure` makes the ids of its plots unique on the page."""
    found: dict[str, list[tuple[Scored, dict[str, Breakdown]]]] = {}
    for one in scored:
        for kind, parts in breakdowns(one.row).items():
            found.setdefault(kind, []).append((one, dict(parts)))
    return [_section(figure, kind, columns) for kind, columns in found.items()]


def _section(figure: str, kind: str, columns: Sequence[tuple[Scored, dict[str, Breakdown]]]) -> BreakdownSection:
    labels = list(dict.fromkeys(label for _, parts in columns for label in parts))
    rows = tuple((_name(label, columns), *(_cell(parts.get(label)) for _, parts in columns)) for label in labels)
    dots = [(label, [_dot(one, parts[label]) for one, parts in columns if label in parts]) for label in labels]
    return BreakdownSection(
        title=f"{columns[0][0].row.suite} by {kind}",
        table=Table((kind, *(one.name for one, _ in columns)), rows),
        dots=dot_plot(f"{figure}-{columns[0][0].row.suite}-{kind}", dots),
    )


def _name(label: str, columns: Sequence[tuple[Scored, dict[str, Breakdown]]]) -> TableCell:
    problems = max(parts[label].num_problems for _, parts in columns if label in parts)
    return TableCell(label, (wording.count(problems, "problem"),))


def _cell(part: Breakdown | None) -> TableCell:
    if part is None:
        return TableCell("–")
    return TableCell(wording.percent(part.accuracy), (wording.interval(*part.interval),))


def _dot(one: Scored, part: Breakdown) -> Dot:
    return Dot(one.color, part.accuracy, *part.interval)

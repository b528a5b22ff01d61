"""The leaderboard: one table per protocol, one row per model, one column per suite, with clear leads marked."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from luffy.evaluation.leaderboard.entries import BoardCell, Column, Entry, EvaluationProtocol, LeftOut
from luffy.evaluation.leaderboard.published import PublishedRow, PublishedTable
from luffy.statistics.accuracy import Estimate, PairedDifference
from luffy.statistics.paired import BenchmarkComparison, compare_paired, holm


@dataclass(frozen=True, slots=True)
class Lead:
    """The best row of a column against the next one, on the same problems."""

    best: Entry
    next: Entry
    comparison: BenchmarkComparison
    """The best against the next, with Holm's correction over the columns that have two rows."""

    @property
    def is_clear(self) -> bool:
        """Whether the best row is significantly better than the next."""
        return self.comparison.is_significant


@dataclass(frozen=True, slots=True)
class Reference:
    """A published row beside a table, with those of its benchmarks that are columns of the table."""

    table: PublishedTable
    row: PublishedRow
    accuracies: Mapping[Column, float]
    """In [0, 1]."""


@dataclass(frozen=True, slots=True)
class BoardTable:
    """All models under one protocol."""

    protocol: EvaluationProtocol
    confidence: float
    columns: tuple[Column, ...]
    rows: tuple[Entry, ...]
    """Rows, the best mean first."""
    leads: Mapping[Column, Lead]
    """For the columns that at least two rows share."""
    references: tuple[Reference, ...]
    note: str = ""
    """Settings that distinguish it from other tables whose protocol reads the same."""

    def mean(self, entry: Entry) -> Estimate | None:
        """The unweighted mean over all columns with its interval; None unless the row has every column.

        The suites are independent samples, so the interval recovers each one's variance from its own interval
        (MOVER: G. Y. Zou and A. Donner, Stat. Med. 27 (2008), eq. 3), and keeps their asymmetry.
        """
        if len(self.columns) < 2 or any(column not in entry.cells for column in self.columns):
            return None
        rows = [entry.cells[column].row for column in self.columns]
        value, n = fmean(row.accuracy for row in rows), len(rows)
        below = math.sqrt(sum((row.accuracy - row.interval[0]) ** 2 for row in rows)) / n
        above = math.sqrt(sum((row.interval[1] - row.accuracy) ** 2 for row in rows)) / n
        return Estimate(value, value - below, value + above, "MOVER", sum(row.num_problems for row in rows))


@dataclass(frozen=True, slots=True)
class Board:
    """Everything the leaderboard shows."""

    tables: tuple[BoardTable, ...]
    published: tuple[PublishedTable, ...]
    left_out: tuple[LeftOut, ...]


def build_board(
    entries: Sequence[Entry], published: Sequence[PublishedTable], left_out: Sequence[LeftOut] = ()
) -> Board:
    """Lay out `entries` (the newest first), with the published rows whose benchmarks are among the suites."""
    groups: dict[str, list[Entry]] = {}
    for entry in entries:
        groups.setdefault(entry.protocol.key, []).append(entry)
    tables = [_table(group, published) for group in groups.values()]
    return Board(tuple(_with_notes(tables)), tuple(published), tuple(left_out))


def _table(entries: Sequence[Entry], published: Sequence[PublishedTable]) -> BoardTable:
    columns = tuple(dict.fromkeys(column for entry in entries for column in entry.cells))
    protocol = entries[0].protocol
    confidence = float(protocol.settings["confidence"])
    return BoardTable(
        protocol=protocol,
        confidence=confidence,
        columns=columns,
        rows=tuple(_ranked(entries, columns)),
        leads=_leads(entries, columns, confidence),
        references=tuple(_references(columns, published)),
    )


def _ranked(entries: Sequence[Entry], columns: Sequence[Column]) -> list[Entry]:
    """Sort rows by the mean over the columns that all rows have; without common columns, by the mean over their own."""
    shared = [column for column in columns if all(column in entry.cells for entry in entries)]
    return sorted(
        entries, key=lambda entry: -fmean(entry.cells[column].row.accuracy for column in shared or entry.cells)
    )


def _leads(entries: Sequence[Entry], columns: Sequence[Column], confidence: float) -> dict[Column, Lead]:
    """The best row against the next in each column with at least two rows, at `confidence` for all columns jointly."""
    pairs = {column: _first_two(entries, column) for column in columns}
    shared = {column: pair for column, pair in pairs.items() if pair is not None}
    paired = [_difference(best, following, column, confidence) for column, (best, following) in shared.items()]
    adjusted = holm([result.p_value for result in paired])
    return {
        column: Lead(best, following, BenchmarkComparison(column.suite, result, p, p < 1 - confidence))
        for (column, (best, following)), result, p in zip(shared.items(), paired, adjusted, strict=True)
    }


def _first_two(entries: Sequence[Entry], column: Column) -> tuple[Entry, Entry] | None:
    having = [entry for entry in entries if column in entry.cells]
    ranked = sorted(having, key=lambda entry: -entry.cells[column].row.accuracy)
    return (ranked[0], ranked[1]) if len(ranked) > 1 else None


def _difference(best: Entry, following: Entry, column: Column, confidence: float) -> PairedDifference:
    first, second = following.cells[column], best.cells[column]
    problems = list(first.correct)
    return compare_paired(_shares(first, problems), _shares(second, problems), column.num_samples, confidence)


def _shares(cell: BoardCell, problems: Sequence[str]) -> list[float]:
    return [cell.correct[uid] / cell.row.num_samples for uid in problems]


def _references(columns: Sequence[Column], published: Sequence[PublishedTable]) -> list[Reference]:
    references = []
    for table in published:
        benchmarks = {column: table.benchmark_of(column.suite, column.num_problems) for column in columns}
        for row in table.rows:
            found = {
                column: row.accuracies[name] / 100 for column, name in benchmarks.items() if name in row.accuracies
            }
            if found:
                references.append(Reference(table, row, found))
    return references


def _with_notes(tables: Sequence[BoardTable]) -> list[BoardTable]:
    """Each table with the settings that differ between it and others whose protocol reads the same."""
    noted = []
    for table in tables:
        alike = [other for other in tables if other.protocol.text == table.protocol.text]
        names = dict.fromkeys(name for other in alike for name in other.protocol.settings)
        differing = [name for name in names if len({other.protocol.settings.get(name) for other in alike}) > 1]
        own = table.protocol.settings
        noted.append(replace(table, note=", ".join(f"{name}: {own.get(name, 'not set')}" for name in differing)))
    return noted

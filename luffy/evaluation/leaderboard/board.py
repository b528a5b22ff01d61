"""The leaderboard as tables: a table a protocol, a row a model, a column a suite; who is best where that is clear."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from luffy.evaluation.leaderboard.entries import Cell, Column, Entry, LeftOut, Protocol
from luffy.evaluation.leaderboard.published import PublishedRow, PublishedTable
from luffy.evaluation.statistics import PairedDifference, paired_difference


@dataclass(frozen=True, slots=True)
class MeanAccuracy:
    """Over the columns of a table, unweighted."""

    value: float
    interval: tuple[float, float]


@dataclass(frozen=True, slots=True)
class Lead:
    """The best row of a column against the next one, on the same problems."""

    best: Entry
    next: Entry
    difference: PairedDifference
    """Of the best minus the next."""

    @property
    def is_clear(self) -> bool:
        """Whether the best may be called so."""
        return self.difference.is_clear


@dataclass(frozen=True, slots=True)
class Reference:
    """A published row beside a table, as far as its benchmarks are the table's columns."""

    table: PublishedTable
    row: PublishedRow
    accuracies: Mapping[Column, float]
    """In [0, 1]."""


@dataclass(frozen=True, slots=True)
class BoardTable:
    """All models under one protocol."""

    protocol: Protocol
    confidence: float
    columns: tuple[Column, ...]
    rows: tuple[Entry, ...]
    """The best mean first."""
    leads: Mapping[Column, Lead]
    """Of the columns that two rows share."""
    references: tuple[Reference, ...]
    note: str = ""
    """What sets it apart from other tables whose protocol reads the same."""

    def mean(self, entry: Entry) -> MeanAccuracy | None:
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
        return MeanAccuracy(value, (value - below, value + above))


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
    leads = {column: _lead(entries, column, confidence) for column in columns}
    return BoardTable(
        protocol=protocol,
        confidence=confidence,
        columns=columns,
        rows=tuple(_ranked(entries, columns)),
        leads={column: lead for column, lead in leads.items() if lead is not None},
        references=tuple(_references(columns, published)),
    )


def _ranked(entries: Sequence[Entry], columns: Sequence[Column]) -> list[Entry]:
    """By the mean over the columns that all rows have; rows that share none come by the mean of their own."""
    shared = [column for column in columns if all(column in entry.cells for entry in entries)]
    return sorted(
        entries, key=lambda entry: -fmean(entry.cells[column].row.accuracy for column in shared or entry.cells)
    )


def _lead(entries: Sequence[Entry], column: Column, confidence: float) -> Lead | None:
    ranked = sorted(
        (entry for entry in entries if column in entry.cells), key=lambda entry: -entry.cells[column].row.accuracy
    )
    if len(ranked) < 2:
        return None
    best, following = ranked[:2]
    difference = _difference(following.cells[column], best.cells[column], confidence)
    return Lead(best, following, difference)


def _difference(first: Cell, second: Cell, confidence: float) -> PairedDifference:
    problems = list(first.correct)
    return paired_difference(_shares(first, problems), _shares(second, problems), confidence)


def _shares(cell: Cell, problems: Sequence[str]) -> list[float]:
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

"""The one type of table: pages show it as HTML or Markdown, terminals as text."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from luffy.report.wording import NBSP

Tone = Literal["", "better", "worse"]


@dataclass(frozen=True, slots=True)
class TableCell:
    """A number or name, with details in small print."""

    text: str
    details: tuple[str, ...] = ()
    tone: Tone = ""

    @property
    def plain(self) -> str:
        """Text and details on one line, without markup."""
        return " ".join((self.text, *self.details)).replace(NBSP, " ")


@dataclass(frozen=True, slots=True)
class Table:
    """A table whose first column names the rows."""

    header: tuple[str, ...]
    rows: tuple[tuple[TableCell, ...], ...]
    note: str = ""
    """A note that is shown with the table."""


def text_table(header: tuple[str, ...], rows: Iterable[Sequence[str]], note: str = "") -> Table:
    """A table of plain texts."""
    return Table(header, tuple(tuple(TableCell(text) for text in row) for row in rows), note)


def plain_table(table: Table) -> tuple[list[str], list[list[str]]]:
    """Header and rows without markup, for a terminal."""
    rows = [[cell.plain for cell in row] for row in table.rows]
    return list(table.header), rows

"""The one type of table: pages show it as HTML or Markdown, terminals as text, notebooks as a DataFrame."""

from dataclasses import dataclass
from typing import Literal

Tone = Literal["", "better", "worse"]


@dataclass(frozen=True, slots=True)
class TableCell:
    """A number with what stands behind it in small print."""

    text: str
    details: tuple[str, ...] = ()
    tone: Tone = ""


@dataclass(frozen=True, slots=True)
class Table:
    """A table whose first column names the rows."""

    header: tuple[str, ...]
    rows: tuple[tuple[TableCell, ...], ...]

"""What the benchmarks share: the checkout, numbers of the command line, and tables."""

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tests"))


def numbers(*defaults: int) -> list[int]:
    """The whole numbers of the command line, with `defaults` for those that were not given."""
    given = [int(argument) for argument in sys.argv[1:]]
    return [*given, *defaults[len(given) :]]


def show(header: Sequence[str], rows: Iterable[Sequence[object]], title: str | None = None, width: int = 160) -> None:
    """Print a table."""
    table = Table(*header, title=title)
    for row in rows:
        table.add_row(*map(str, row))
    Console(width=width).print(table)

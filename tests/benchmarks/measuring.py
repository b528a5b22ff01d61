"""What the benchmarks share: the checkout, small models, timers, the memory of this process, and tables."""

import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tests"))


def numbers(*defaults: int) -> list[int]:
    """The whole numbers of the command line, with `defaults` for those that were not given."""
    given = [int(argument) for argument in sys.argv[1:]]
    return [*given, *defaults[len(given) :]]


def environment_without_server(**more: str) -> dict[str, str]:
    """This process's environment without a Prefect server and a workspace of the user's."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "LUFFY_"))}
    return kept | more


def fastest(
    ways: Mapping[str, Callable[[], object]], rounds: int = 3, clock: Callable[[], float] = time.perf_counter
) -> dict[str, float]:
    """Seconds of each way by `clock`, the fastest of the rounds, which take them in turn."""
    found = dict.fromkeys(ways, float("inf"))
    for _ in range(rounds):
        for name, work in ways.items():
            began = clock()
            work()
            found[name] = min(found[name], clock() - began)
    return found


def memory_bytes(field: str) -> int:
    """A line of this process's `/proc/self/status`: `VmRSS`, or its highest value so far, `VmHWM`."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[field].split()[0]) * 1024


def forget_peak() -> None:
    """Let `VmHWM` begin anew."""
    Path("/proc/self/clear_refs").write_text("5")


def show(header: Sequence[str], rows: Iterable[Sequence[object]], title: str | None = None, width: int = 160) -> None:
    """Print a table."""
    table = Table(*header, title=title)
    for row in rows:
        table.add_row(*map(str, row))
    Console(width=width).print(table)

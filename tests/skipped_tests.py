"""How many tests were skipped for want of what, one line each, at the end of a run.

`--skipped-to FILE` also lists the skipped tests, one a line: `pytest @FILE` runs them when what they need is there.
The reason of a skip reads `needs WHAT`, or `needs WHAT: DETAIL`; the tests that need the same thing share a line.
"""

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--skipped-to", type=Path, metavar="FILE", help="list the skipped tests in FILE")


def num_skipped(reasons: Iterable[str]) -> dict[str, int]:
    """Number of skips for each thing that was missing, the most frequent first."""
    wanted = (reason.removeprefix("Skipped: ").partition(":")[0].strip() for reason in reasons)
    return dict(Counter(wanted).most_common())


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    skipped = [report for report in terminalreporter.stats.get("skipped", []) if isinstance(report.longrepr, tuple)]
    if file := terminalreporter.config.getoption("--skipped-to"):
        file.write_text("".join(f"{name}\n" for name in sorted({report.nodeid for report in skipped})))
    if not skipped:
        return
    terminalreporter.section("tests that were skipped")
    for what, number in num_skipped(report.longrepr[2] for report in skipped).items():
        terminalreporter.line(f"{number:5d}  {what}")

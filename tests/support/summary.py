"""What a session of tests says: failures at once; at its end what was skipped and how to have it run, and what it cost.

`--skipped-to FILE` lists the skipped tests, one a line. With `--as-slow FILE` they belong to the second tier, so that
one session runs it and them once what they need is there. The reason of a skip reads `needs WHAT`, or
`needs WHAT: HOW TO HAVE IT`; tests with the same reason are counted together. `--costs` prints the CPU seconds of the
costliest files and tests, with those of the processes that they waited for.
"""

import os
from collections import Counter
from collections.abc import Generator, Iterable
from pathlib import Path

import pytest

NUM_FILES, NUM_TESTS = 25, 15
_spent = [0.0]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--skipped-to", type=Path, metavar="FILE", help="list the skipped tests in FILE")
    parser.addoption("--as-slow", type=Path, metavar="FILE", help="mark the tests that FILE lists as slow")
    parser.addoption("--costs", action="store_true", help="print the CPU seconds of the costliest files and tests")


def pytest_sessionstart(session: pytest.Session) -> None:
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None:  # workers of pytest-xdist have none
        session.config.pluginmanager.register(FailedTests(reporter))


@pytest.hookimpl(tryfirst=True)  # before pytest selects by marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    listed = {*file.read_text().splitlines()} if (file := config.getoption("--as-slow")) else set()
    for item in items:
        if item.nodeid in listed:
            item.add_marker("slow")


def pytest_runtestloop() -> None:
    """What collection has cost is nobody's."""
    _spent[0] = sum(os.times()[:4])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Note what this phase of the test has cost, in the report's `cpu_s`."""
    report = yield
    spent = sum(os.times()[:4])  # with the ended children that were waited for
    report.cpu_s, _spent[0] = spent - _spent[0], spent  # type: ignore[attr-defined]
    return report


class FailedTests:
    """Names them when they fail, so that a run that is ended before its summary says which they were."""

    def __init__(self, reporter: pytest.TerminalReporter) -> None:
        self._reporter = reporter

    @pytest.hookimpl(trylast=True)  # after the reporter's own F
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._reporter.ensure_newline()
            self._reporter.write_line(line_of(report))


def line_of(report: pytest.TestReport) -> str:
    """The test, how long it took, and the first line of its error."""
    crash = getattr(report.longrepr, "reprcrash", None)
    message = crash.message if crash is not None else str(report.longrepr)
    first = next(iter(message.splitlines()), "")
    return f"{report.nodeid} failed ({report.when}, {report.duration:.0f} s): {first}"


def skipped_line(reasons: Iterable[str]) -> str:
    """Number of skips for each thing that was missing, the most frequent first, and how to have it; empty: none."""
    wanted = Counter(reason.removeprefix("Skipped: ").partition(":")[::2] for reason in reasons)
    parts = (f"{n} {what.strip()}" + (f" ({how.strip()})" if how else "") for (what, how), n in wanted.most_common())
    return f"skipped: {'; '.join(parts)}" if wanted else ""


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    options, stats = terminalreporter.config.option, terminalreporter.stats
    reports = [report for outcome in stats.values() for report in outcome if isinstance(report, pytest.TestReport)]
    skipped = [report for report in stats.get("skipped", []) if isinstance(report.longrepr, tuple)]
    if options.skipped_to:
        options.skipped_to.write_text("".join(f"{name}\n" for name in sorted({report.nodeid for report in skipped})))
    if options.costs:
        terminalreporter.section("CPU seconds")
        for name, number in (("file", NUM_FILES), ("test", NUM_TESTS)):
            costs: Counter[str] = Counter()
            for report in reports:
                costs[report.nodeid.partition("::")[0] if name == "file" else report.nodeid] += report.cpu_s
            terminalreporter.line(f"{sum(costs.values()):8.1f} in {len(costs)} {name}s")
            for place, cost in costs.most_common(number):
                terminalreporter.line(f"{cost:8.1f} {place}")
    if line := skipped_line(report.longrepr[2] for report in skipped):
        terminalreporter.line(line)

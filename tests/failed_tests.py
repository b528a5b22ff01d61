"""Failed tests are named when they fail, so that a run that is ended before its summary says which they were."""

import pytest


def line_of(report: pytest.TestReport) -> str:
    """The test, how long it took, and the first line of its error."""
    crash = getattr(report.longrepr, "reprcrash", None)
    message = crash.message if crash is not None else str(report.longrepr)
    first = next(iter(message.splitlines()), "")
    return f"{report.nodeid} failed ({report.when}, {report.duration:.0f} s): {first}"


class FailedTests:
    def __init__(self, reporter: pytest.TerminalReporter) -> None:
        self._reporter = reporter

    @pytest.hookimpl(trylast=True)  # after the reporter's own F
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._reporter.ensure_newline()
            self._reporter.write_line(line_of(report))


def pytest_sessionstart(session: pytest.Session) -> None:
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None:  # workers of pytest-xdist have none
        session.config.pluginmanager.register(FailedTests(reporter))

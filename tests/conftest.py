"""What all tests share: failed tests are named at once, skipped tests at the end of a run; hypothesis has no deadline;
pools share a grading server; Ray's workers have the priority of everything else."""

import gc
import os
from collections.abc import Generator

import pytest
from hypothesis import settings
from one_grading_server import grading_server
from skipped_tests import pytest_addoption, pytest_terminal_summary

from luffy.library_loading import without_collections

__all__ = ["grading_server", "pytest_addoption", "pytest_terminal_summary"]

LONGEST = ("test_gradient_equality.py", "test_compilation.py", "test_policy.py")
"""Files that take minutes and whose names come late: the end of a run would wait for them alone."""

settings.register_profile("patient", deadline=None)  # a loaded machine is no failure
settings.load_profile("patient")
# Ray's own default is 15: next to other work on the same cores its workers would hardly run.
os.environ.setdefault("RAY_worker_niceness", "0")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """All tests and their libraries are imported without looking for garbage."""
    with without_collections(freeze=False):
        return (yield)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.name not in LONGEST)


def pytest_collection_finish() -> None:
    """Thousands of tests and all the libraries stay in memory; collections of garbage need not walk over them."""
    gc.collect()
    gc.freeze()


def line_of(report: pytest.TestReport) -> str:
    """The test, how long it took, and the first line of its error."""
    crash = getattr(report.longrepr, "reprcrash", None)
    message = crash.message if crash is not None else str(report.longrepr)
    first = next(iter(message.splitlines()), "")
    return f"{report.nodeid} failed ({report.when}, {report.duration:.0f} s): {first}"


class FailedTests:
    """Names them when they fail, so that a run that is ended before its summary says which they were."""

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

"""One grading server for all pools of a test process: loading it takes longer than most tests in which pools grade.

The workers are forked for each pool, and end with it, as ever. Tests of the server itself, in tests/unit/grading, have
servers of their own.
"""

import functools
from collections.abc import Iterator, Sequence

import pytest

from luffy.grading import workers
from luffy.grading.workers import ForkServer


class _SharedServer(ForkServer):
    def interrupt_loading(self) -> None:
        """For other pools it goes on."""

    def close(self) -> None:
        """It ends with the tests."""


@functools.cache
def _shared() -> ForkServer:
    return _SharedServer()


def _server(functions: Sequence[str] = ()) -> ForkServer:
    return ForkServer(functions) if functions else _shared()


@pytest.fixture(scope="module", autouse=True)
def grading_server() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(workers, "ForkServer", _server)
        yield

"""What all tests share: what a session says, hypothesis without a deadline, one grading server for all pools, and the
priority of Ray's workers."""

import gc
import os
from collections.abc import Generator

import pytest
from hypothesis import settings
from support.one_grading_server import grading_server

from luffy.library_loading import without_collections

__all__ = ["grading_server"]
pytest_plugins = ["support.summary"]

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

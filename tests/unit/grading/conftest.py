"""Pools of these tests start the grading servers that users have."""

from collections.abc import Iterator

import pytest
from support.patience import PATIENCE_S

from luffy.grading.pool import GraderPool


@pytest.fixture(scope="module", autouse=True)
def grading_server() -> None:
    """In place of the shared one (tests/support/one_grading_server.py)."""


@pytest.fixture(scope="module")
def pool(grading_server: None) -> Iterator[GraderPool]:
    with GraderPool(2, PATIENCE_S) as shared:
        yield shared

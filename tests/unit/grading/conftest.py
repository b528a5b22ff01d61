"""Pools of these tests start the grading servers that users have; one pool serves all tests of a process that only
ask it for verdicts."""

import pytest
from support.patience import PATIENCE_S

from luffy.config.grading import GradingConfig, MathGrader
from luffy.grading.pool import GraderPool


@pytest.fixture(scope="module", autouse=True)
def grading_server():
    """In place of the shared one (tests/support/one_grading_server.py)."""


@pytest.fixture(scope="session")
def pool():
    with GraderPool(2, PATIENCE_S, GradingConfig(named={"lenient": MathGrader(boxed="preferred")})) as shared:
        yield shared

"""Pools of these tests start the grading servers that users have."""

import pytest


@pytest.fixture(scope="module", autouse=True)
def grading_server() -> None:
    """In place of the shared one (tests/one_grading_server.py)."""

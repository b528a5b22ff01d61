"""Ranks agree on many things: here there is one."""

import pytest

from luffy.training.ranks import init_process_group


@pytest.fixture(scope="session", autouse=True)
def one_rank() -> None:
    init_process_group()

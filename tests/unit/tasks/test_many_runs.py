"""What several runs need is made by the first of them; the others wait, and fail where it fails."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.patience import PATIENCE_S

from luffy.errors import StageFailed
from luffy.tasks.many_runs import SharedStages


def test_runs_wait_for_a_stage_that_they_share_and_for_no_other():
    shared, inside = SharedStages(), []
    started, both = threading.Barrier(4), threading.Barrier(2)

    def alone():
        inside.append(1)
        assert len(inside) == 1
        return inside.pop()

    def ask(key):
        started.wait(PATIENCE_S)
        return shared.make(key, alone)

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(ask, ["a"] * 4)) == [1] * 4
        assert sorted(pool.map(lambda key: shared.make(key, lambda: both.wait(PATIENCE_S)), "ab")) == [0, 1]


def test_a_failure_is_not_tried_again_by_every_run():
    shared, calls = SharedStages(), []

    def fail():
        calls.append(1)
        raise StageFailed("sft was ended by SIGKILL")

    for _ in range(3):
        with pytest.raises(StageFailed, match="SIGKILL"):
            shared.make("a", fail)
    assert len(calls) == 1

"""What several runs of a comparison need is made by the first of them; the others wait, and fail where it fails."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from patience import PATIENCE_S

from luffy.errors import StageFailed
from luffy.pipeline.reuse import FinishedStage
from luffy.tasks.many_runs import SharedStages

MADE = FinishedStage.model_construct(stage="sft", key="x", inputs={}, digest="digest")


def test_the_others_wait_for_the_first():
    shared, inside, calls = SharedStages(), [], []
    started = threading.Barrier(4)

    def make():
        inside.append(1)
        assert len(inside) == 1
        calls.append(threading.get_ident())
        inside.pop()
        return MADE

    def ask(key):
        started.wait(PATIENCE_S)
        return shared.make(key, make)

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(ask, ["a"] * 4)) == [MADE] * 4
    assert len(calls) == 4  # each asks, and the stage directory has what the first one made


def test_different_stages_do_not_wait_for_each_other():
    shared, both = SharedStages(), threading.Barrier(2)

    def make():
        both.wait(PATIENCE_S)
        return MADE

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(lambda key: shared.make(key, make), "ab")) == [MADE] * 2


def test_a_failure_is_not_tried_again_by_every_run():
    shared, calls = SharedStages(), []

    def fail():
        calls.append(1)
        raise StageFailed("sft was ended by SIGKILL")

    for _ in range(3):
        with pytest.raises(StageFailed, match="SIGKILL"):
            shared.make("a", fail)
    assert len(calls) == 1

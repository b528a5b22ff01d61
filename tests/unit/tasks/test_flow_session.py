"""A flow's stages: their log in Prefect, and stages that several runs share."""

import logging
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.patience import PATIENCE_S

from luffy.errors import ConfigError, StageFailed
from luffy.tasks.many_runs import SharedStages
from luffy.tasks.session import StageLog, in_one_line

STAMP = "2026-11-21 20:31:08,023"


class Lines:
    def __init__(self):
        self.told = []
        self.now = 0.0
        self.log_of_stage = StageLog(self.log, clock=lambda: self.now)

    def log(self, level, message, *args):
        self.told.append((logging.getLevelName(level), message % args))

    def take(self, *lines):
        for line in lines:
            self.log_of_stage.line(line)
        return self.told


@pytest.mark.parametrize(
    ("lines", "levels"),
    [
        ([f"{STAMP} DEBUG luffy: a", f"{STAMP} ERROR luffy: b"], ["DEBUG", "ERROR"]),
        (
            [f"{STAMP} WARNING luffy: a", "  more of it", f"{STAMP} INFO luffy: b", "and more"],
            ["WARNING"] * 2 + ["INFO"] * 2,
        ),
        (["Traceback (most recent call last):", '  File "x.py", line 1, in <module>', "ValueError: no"], ["ERROR"] * 3),
        (["[20:31] [WARNING] [accelerator.py:213] no GPU"], ["WARNING"]),
        (["Loading weights: 100%|##########| 27/27 [00:00<00:00, 22785.96it/s]", "", "a\rb", "   "], []),
    ],
)
def test_lines_have_the_level_of_their_record_and_progress_bars_are_left_out(lines, levels):
    assert [level for level, _ in Lines().take(*lines)] == levels


def test_a_record_is_shown_without_its_stamp():
    assert Lines().take(f"{STAMP} INFO luffy.stages.rl: resumed") == [("INFO", "luffy.stages.rl: resumed")]


def test_a_flood_is_cut_and_counted():
    lines = Lines()
    lines.take(*(f"{STAMP} INFO luffy: {index}" for index in range(250)))
    assert len(lines.told) == 100
    lines.now = 11.0
    lines.take(f"{STAMP} INFO luffy: later")
    assert lines.told[100:] == [("WARNING", "150 lines left out here; they are in log.txt"), ("INFO", "luffy: later")]


@pytest.mark.parametrize("error", [ConfigError("rl.stepz: unknown key"), RuntimeError("a defect")])
def test_a_mistake_is_one_line_and_a_defect_keeps_its_traceback(error):
    raised = (type(error), error, None)
    record = logging.LogRecord("prefect.flow_runs", logging.ERROR, "", 0, "failed: %r", (error,), raised)
    assert in_one_line(record)
    one_line = (record.getMessage(), record.exc_info) == (str(error), None)
    assert one_line == isinstance(error, ConfigError) and (one_line or record.exc_info == raised)


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

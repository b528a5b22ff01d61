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
LINES = [
    ([f"{STAMP} DEBUG luffy: a", f"{STAMP} ERROR luffy: b"], ["DEBUG", "ERROR"]),
    ([f"{STAMP} WARNING luffy: a", "  more of it", f"{STAMP} INFO luffy: b", "and"], ["WARNING"] * 2 + ["INFO"] * 2),
    (["Traceback (most recent call last):", '  File "x.py", line 1, in <module>', "ValueError: no"], ["ERROR"] * 3),
    (["[20:31] [WARNING] [accelerator.py:213] no GPU"], ["WARNING"]),
    (["Loading weights: 100%|##########| 27/27 [00:00<00:00, 22785.96it/s]", "", "a\rb", "   "], []),
]


def told(lines, clock=lambda: 0.0):
    """What reaches Prefect of the lines of a stage's log, with their levels."""
    found = []
    log = StageLog(lambda level, words, *args: found.append((logging.getLevelName(level), words % args)), clock)
    for line in lines:
        log.line(line)
    return found


@pytest.mark.parametrize(("lines", "levels"), LINES)
def test_lines_have_the_level_of_their_record_and_progress_bars_are_left_out(lines, levels):
    assert [level for level, _ in told(lines)] == levels


def test_a_record_is_shown_without_its_stamp_and_a_flood_is_cut_and_counted():
    times = iter([0.0] * 250 + [11.0])
    found = told((f"{STAMP} INFO luffy.stages.rl: {index}" for index in range(251)), lambda: next(times))
    assert found[:100] == [("INFO", f"luffy.stages.rl: {index}") for index in range(100)]
    left_out = "150 lines left out here; they are in log.txt"
    assert found[100:] == [("WARNING", left_out), ("INFO", "luffy.stages.rl: 250")]


@pytest.mark.parametrize("error", [ConfigError("rl.stepz: unknown key"), RuntimeError("a defect")])
def test_a_mistake_is_one_line_and_a_defect_keeps_its_traceback(error):
    raised = (type(error), error, None)
    record = logging.LogRecord("prefect.flow_runs", logging.ERROR, "", 0, "failed: %r", (error,), raised)
    assert in_one_line(record)
    one_line = (record.getMessage(), record.exc_info) == (str(error), None)
    assert one_line == isinstance(error, ConfigError) and (one_line or record.exc_info == raised)


def test_runs_wait_for_a_stage_that_they_share_and_for_no_other_and_a_failure_is_not_tried_again():
    shared, inside, failures = SharedStages(), [], []
    started, both = threading.Barrier(4), threading.Barrier(2)

    def alone():
        inside.append(1)
        assert len(inside) == 1
        return inside.pop()

    def ask(key):
        started.wait(PATIENCE_S)
        return shared.make(key, alone)

    def fail():
        failures.append(1)
        raise StageFailed("sft was ended by SIGKILL")

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(ask, ["a"] * 4)) == [1] * 4
        assert sorted(pool.map(lambda key: shared.make(key, lambda: both.wait(PATIENCE_S)), "ab")) == [0, 1]
    for _ in range(3):
        with pytest.raises(StageFailed, match="SIGKILL"):
            shared.make("c", fail)
    assert len(failures) == 1

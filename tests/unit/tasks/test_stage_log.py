"""A stage's log in Prefect: every line with its level, and never more than Prefect can take."""

import logging

import pytest

from luffy.errors import ConfigError
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


@pytest.mark.parametrize("level", ["DEBUG", "INFO", "WARNING", "ERROR"])
def test_a_record_keeps_its_level(level):
    assert Lines().take(f"{STAMP} {level} luffy.stages.rl: resumed") == [(level, "luffy.stages.rl: resumed")]


def test_further_lines_of_a_record_have_its_level():
    told = Lines().take(f"{STAMP} WARNING luffy: two lines", "  the second", f"{STAMP} INFO luffy: next", "and more")
    assert [level for level, _ in told] == ["WARNING", "WARNING", "INFO", "INFO"]


def test_a_traceback_is_an_error():
    told = Lines().take("Traceback (most recent call last):", '  File "x.py", line 1, in <module>', "ValueError: no")
    assert {level for level, _ in told} == {"ERROR"}


def test_another_librarys_warning_is_one():
    assert Lines().take("[20:31] [WARNING] [accelerator.py:213] no GPU")[0][0] == "WARNING"


def test_progress_bars_and_empty_lines_are_left_out():
    bar = "Loading weights: 100%|##########| 27/27 [00:00<00:00, 22785.96it/s]"
    assert Lines().take(bar, "", "a\rb", "   ") == []


def test_a_flood_is_cut_and_counted():
    lines = Lines()
    lines.take(*(f"{STAMP} INFO luffy: {index}" for index in range(250)))
    assert len(lines.told) == 100
    lines.now = 11.0
    lines.take(f"{STAMP} INFO luffy: later")
    assert lines.told[100:] == [("WARNING", "150 lines left out here; they are in log.txt"), ("INFO", "luffy: later")]


@pytest.mark.parametrize(("error", "text"), [(ConfigError("rl.stepz: unknown key"), "rl.stepz: unknown key")])
def test_a_mistake_is_one_line_without_a_traceback(error, text):
    record = logging.LogRecord(
        "prefect.flow_runs", logging.ERROR, "", 0, "failed: %r", (error,), (type(error), error, None)
    )
    assert in_one_line(record)
    assert (record.getMessage(), record.exc_info) == (text, None)


def test_a_defect_keeps_its_traceback():
    error = RuntimeError("a defect")
    record = logging.LogRecord(
        "prefect.flow_runs", logging.ERROR, "", 0, "failed: %r", (error,), (type(error), error, None)
    )
    assert in_one_line(record)
    assert record.exc_info is not None

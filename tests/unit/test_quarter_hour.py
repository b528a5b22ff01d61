"""The program of `make test-gpu`: limits, failures and what is kept."""

import sys
from pathlib import Path

import psutil
import pytest
from gpu.quarter_hour import Part, Report, parts, run_all
from support.patience import wait_until

STUBBORN = """
import pathlib, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
pathlib.Path(sys.argv[1]).write_text(str(child.pid))
print("started", flush=True)
time.sleep(600)
"""


def program(text: str, *arguments: str) -> list[str]:
    return [sys.executable, "-c", text, *arguments]


def test_a_part_at_its_limit_ends_with_its_children_and_the_next_one_runs(tmp_path):
    known = {
        "long": Part([program(STUBBORN, str(tmp_path / "pid")), program("print('never')")], 10.0),
        "broken": Part([program("raise SystemExit('no such kernel')"), program("print('second command')")], 60.0),
        "absent": Part([program("print('never')")], 60.0, needs=("no_such_package",)),
        "good": Part([program("print('noise'); print('result 7')")], 60.0, shown="result"),
    }
    groups = [["long"], ["broken", "absent"], ["good"]]
    assert run_all(known, groups, {}, 300.0, tmp_path, Report(tmp_path / "out")) == 1
    child = int((tmp_path / "pid").read_text())
    wait_until(lambda: not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE)
    results = (tmp_path / "out" / "results.txt").read_text()
    for expected in ("cut at 10 s", "exit code 1", "second command", "no_such_package is not installed", "result 7"):
        assert expected in results
    assert "never" not in results
    assert "noise" not in results
    assert "noise" in (tmp_path / "out" / "log.txt").read_text()


def test_nothing_starts_once_the_total_is_used_up(tmp_path):
    known = {"late": Part([program("print('never')")], 60.0)}
    assert run_all(known, [["late"]], {}, 1.0, tmp_path, Report(tmp_path)) == 0
    assert "late: skipped: no time left" in (tmp_path / "results.txt").read_text()


@pytest.mark.parametrize("miniature", [True, False])
def test_every_file_that_a_part_names_exists(miniature, tmp_path):
    root = Path(__file__).parents[2]
    for part in parts(tmp_path, miniature).values():
        for word in (word for command in part.commands for word in command):
            if word.endswith((".py", ".yaml")) and not word.startswith("--"):
                assert (root / word).exists(), word

"""Ending child processes, with real ones."""

import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest
from support.patience import PATIENCE_S

from luffy.processes import end_group

READY = "print('ready', flush=True); import time; time.sleep(600)"
DEAF = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {READY}"
PARENT = f"""
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", {DEAF!r}], stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
"""


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[bytes]]]:
    processes: list[subprocess.Popen[bytes]] = []
    yield processes
    for process in processes:
        process.kill()
        process.wait()


def start(started: list[subprocess.Popen[bytes]], program: str) -> tuple[subprocess.Popen[bytes], bytes]:
    """A process that leads a group, and the line that it prints once it runs."""
    command = [sys.executable, "-c", program]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
    started.append(process)
    assert process.stdout is not None
    return process, process.stdout.readline()


@pytest.mark.parametrize(("program", "grace_s", "code"), [(READY, 60.0, -15), (DEAF, 0.1, -9)])
def test_a_process_that_ignores_sigterm_is_killed_and_any_other_ends_by_it(started, program, grace_s, code):
    process, _ = start(started, program)
    end_group(process, grace_s=grace_s)
    assert process.returncode == code


def test_a_process_that_has_ended_keeps_its_exit_code(started):
    process, _ = start(started, "print('ready', flush=True); raise SystemExit(7)")
    process.wait()
    end_group(process)
    assert process.returncode == 7


def test_a_group_ends_though_its_leader_has_ended_before(started):
    leader, line = start(started, PARENT)
    grandchild = psutil.Process(int(line))
    end_group(leader, grace_s=60.0)
    assert (
        not grandchild.is_running()
        or grandchild.status() == psutil.STATUS_ZOMBIE
        or grandchild.wait(PATIENCE_S) is None
    )

"""Ending child processes, requests to stop, and how programs load their libraries: with real processes."""

import gc
import os
import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest
from support.patience import ran, wait_until_ended

from luffy.library_loading import without_collections
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
    wait_until_ended([grandchild])


# A second signal after each line that the handler of the first one runs, each time in a process of its own.
INTERRUPTED_HANDLERS = """
import os, signal, sys
from luffy import stop_request

stop_request.receive_stop_requests()

def interrupted_after(lines):
    left = lines
    def trace(frame, event, argument):
        nonlocal left
        left -= 1
        if not left:
            signal.raise_signal(signal.SIGTERM)
        return trace
    with stop_request.deferring_stop_requests(3600.0, lambda: None):
        sys.settrace(trace)
        signal.raise_signal(signal.SIGUSR1)
        sys.settrace(None)
        assert stop_request.stop_is_requested()
    return left <= 0

for lines in range(1, 200):
    if (child := os.fork()) == 0:
        signal.alarm(60)
        os._exit(0 if interrupted_after(lines) else 1)
    if status := os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
        print("ended" if status == 1 else f"stuck after line {lines}: {status}")
        break
"""


def test_a_signal_may_interrupt_the_handler_of_another():
    done = ran([sys.executable, "-c", INTERRUPTED_HANDLERS])
    assert done.stdout == "ended\n", done.stderr


@pytest.mark.parametrize("freeze", [True, False])
def test_nothing_is_collected_within_the_block_and_what_it_made_is_frozen_but_in_the_middle_of_a_program(freeze):
    frozen = gc.get_freeze_count()
    with without_collections(freeze=freeze):
        assert not gc.isenabled()
        kept = [[] for _ in range(10_000)]
    assert gc.isenabled()
    assert gc.get_freeze_count() - frozen >= len(kept) if freeze else gc.get_freeze_count() <= frozen


def test_a_failed_import_leaves_collection_on_and_a_program_that_had_it_off_keeps_it_off():
    with pytest.raises(ImportError), without_collections():
        raise ImportError
    assert gc.isenabled()
    gc.disable()
    try:
        with without_collections():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


PROBE = """
import gc, sys
print(gc.isenabled(), __name__, sys.argv[1:], sys.orig_argv[1:])
from luffy.library_loading import loaded
loaded()
print(gc.isenabled(), gc.get_freeze_count() > 0)
"""


def test_a_module_runs_as_by_python_m_and_collects_from_when_it_says_that_it_is_loaded(tmp_path):
    (tmp_path / "probe.py").write_text(PROBE)
    done = ran([sys.executable, "-m", "luffy.library_loading", "probe", "--out", "x"], cwd=tmp_path)
    assert done.stdout.splitlines() == ["False __main__ ['--out', 'x'] ['-m', 'probe', '--out', 'x']", "True True"]


TWO_STAGES = """
import time
from luffy.processes import begin_stage, peak_memory_bytes, stage_began
large, began = b"x" * (1 << 28), stage_began()
del large
before, now = peak_memory_bytes(), time.time()
begin_stage()
print(before >> 28, before - peak_memory_bytes() > 1 << 27, began < now <= stage_began())
"""


def test_a_stage_that_another_left_its_process_to_has_a_start_and_a_peak_of_its_own(tmp_path):
    assert ran([sys.executable, "-c", TWO_STAGES]).stdout == "1 True True\n"


WITH_DEEPSPEED = """
import sys
from luffy.library_loading import without_collections
with without_collections():
    import deepspeed
from pathlib import Path
print("mlflow" in sys.modules, "pyarrow" in sys.modules, len(list(Path("/proc/self/task").iterdir())))
import mlflow
print(mlflow.__name__)
"""


def test_deepspeed_loads_no_mlflow_and_its_thread_and_others_can_load_it_afterwards(tmp_path):
    (tmp_path / "mlflow.py").touch()  # in place of the package
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(tmp_path)}
    done = ran([sys.executable, "-c", WITH_DEEPSPEED], env=environment)
    assert done.stdout.splitlines()[-2:] == ["False False 1", "mlflow"]

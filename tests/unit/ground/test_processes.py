"""Ending child processes, requests to stop, how programs load their libraries, shared tensors: with real processes."""

import base64
import gc
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace

import psutil
import pytest
import torch
from support.patience import ran, wait_until_ended

from luffy.library_loading import without_collections
from luffy.processes import end_group
from luffy.tensor_sharing import SharedTensor, SharingFailed

READY = "print('ready', flush=True); import time; time.sleep(600)"
DEAF = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {READY}"
PARENT = f"""
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", {DEAF!r}], stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
"""


@pytest.fixture
def start() -> Iterator[Callable[[str], tuple[subprocess.Popen[bytes], bytes]]]:
    """Starts a process that leads a group, until the end of the test: it, and the line that it prints once it runs."""
    with ExitStack() as started:

        def begin(program):
            command = [sys.executable, "-c", program]
            pipe = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
            process = started.enter_context(pipe)
            started.callback(process.kill)
            return process, process.stdout.readline()

        yield begin


ENDS = [(READY, 60.0, -15), (DEAF, 0.1, -9), ("print('ready', flush=True); raise SystemExit(7)", 60.0, 7)]


@pytest.mark.parametrize(("program", "grace_s", "code"), ENDS)
def test_a_process_that_ignores_sigterm_is_killed_and_any_other_ends_by_it_or_has_its_own_exit_code(
    start, program, grace_s, code
):
    process, _ = start(program)
    if code == 7:
        process.wait()
    end_group(process, grace_s=grace_s)
    assert process.returncode == code


def test_a_group_ends_though_its_leader_has_ended_before(start):
    leader, line = start(PARENT)
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
    with pytest.raises(ImportError), without_collections(freeze=freeze):
        raise ImportError
    assert gc.isenabled()
    gc.disable()
    try:
        with without_collections(freeze=freeze):
            pass
        assert not gc.isenabled(), "as before"
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


ADDS_ONE = """
import base64, pickle, sys
shared = pickle.loads(base64.b64decode(sys.argv[1]))
with shared.opened() as tensor:
    print(tensor.sum().item())
    tensor += 1
"""


def test_another_process_reads_and_writes_the_same_memory_and_what_cannot_be_opened_is_named():
    tensor = torch.arange(6, dtype=torch.uint8)[2:]
    shared = SharedTensor.of(tensor)
    done = ran([sys.executable, "-c", ADDS_ONE, base64.b64encode(pickle.dumps(shared)).decode()])
    assert done.stdout.strip() == "14", done.stderr
    assert tensor.tolist() == [3, 4, 5, 6]
    elsewhere = replace(shared, gpu="GPU-elsewhere")
    lost = replace(shared, handle=shared.handle.replace(b"/torch_", b"/trrch_"))
    for cannot, why in ((elsewhere, "does not see GPU GPU-elsewhere"), (lost, "trrch")):
        with pytest.raises(SharingFailed, match=why), cannot.opened():
            pass

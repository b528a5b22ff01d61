"""A rank that has done its work ends with its exit code, whatever gloo's threads still do."""

import re
import sys

import pytest
from support.patience import ran
from support.ranks import torchrun

# The main thread goes on to the end without giving the GIL up, while gloo's thread waits for it to release a tensor.
RANK = """
import ctypes, os, sys
import torch
import torch.distributed as dist
from luffy.processes import exit_without_finalizing
from luffy.training.ranks import init_process_group

def gather():
    dist.all_gather([torch.zeros(1000) for _ in range(dist.get_world_size())], torch.ones(1000))

init_process_group()
kept = dist.group.WORLD  # as DeepSpeed keeps it
dist.barrier()
sys.setswitchinterval(1000)
gather()
ctypes.PyDLL(None).usleep(200_000)
sys.stdout.write("done")  # without a line's end it is written at the end of the process
exit_without_finalizing(3)
"""


@pytest.mark.slow
def test_two_ranks_end_with_their_code_and_their_output(tmp_path):
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    done = torchrun(2, str(script))
    assert "terminate called" not in done.stderr
    assert done.stdout.endswith("donedone"), done.stdout  # after what DeepSpeed says
    codes = re.findall(r"exitcode *: (-?\d+)", done.stderr)
    assert "3" in codes and "-6" not in codes, done.stderr


@pytest.mark.parametrize("ending", ["print('late')", "raise SystemExit(5)"])
def test_threads_and_exit_handlers_finish_first(ending):
    code = f"""
import atexit, threading
from luffy.processes import exit_without_finalizing
atexit.register(print, "handler")
go_on = threading.Event()
def late():
    go_on.wait()
    {ending}
threading.Thread(target=late).start()
atexit.register(print, "first")
threading.Timer(0, go_on.set).start()
exit_without_finalizing(4)
"""
    done = ran([sys.executable, "-c", code])
    assert done.returncode == 4
    assert done.stdout.split() == [*(["late"] if "late" in ending else []), "first", "handler"]

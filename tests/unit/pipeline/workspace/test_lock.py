import errno
import os
import subprocess
import sys
import threading

from patience import PATIENCE_S, wait_until

from luffy.pipeline.workspace.lock import LOCK_FILE, StageLock, holder_of

HOLD = "import sys, time; from pathlib import Path; from luffy.pipeline.workspace.lock import StageLock\n"
HOLD += "with StageLock(Path(sys.argv[1])): print('locked', flush=True); time.sleep(7200)"


def hold(directory):
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(directory)], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "locked\n"
    return process


def test_the_holder_is_known_by_its_pid(tmp_path):
    assert holder_of(tmp_path) is None
    with StageLock(tmp_path):
        assert f"pid {os.getpid()} " in holder_of(tmp_path)
    assert holder_of(tmp_path) is None


def test_a_waiter_learns_the_holder_and_gets_the_lock_when_it_is_killed(tmp_path):
    process, told = hold(tmp_path), []
    waiter = threading.Thread(target=lambda: StageLock(tmp_path, told.append).__enter__())
    waiter.start()
    wait_until(lambda: told)
    assert waiter.is_alive()
    assert [f"pid {process.pid} " in name for name in told] == [True]
    process.kill()
    process.wait()
    waiter.join(PATIENCE_S)
    assert not waiter.is_alive()


def test_a_waiter_says_so_where_the_holder_could_not_write_its_name(tmp_path):
    process, told = hold(tmp_path), []
    (tmp_path / LOCK_FILE).write_text("")
    waiter = threading.Thread(target=lambda: StageLock(tmp_path, told.append).__enter__())
    waiter.start()
    wait_until(lambda: told)
    process.kill()
    process.wait()
    waiter.join(PATIENCE_S)
    assert told == ["another process"]


def test_a_child_that_outlives_the_holder_does_not_keep_the_lock(tmp_path):
    with StageLock(tmp_path):
        child = subprocess.Popen(["sleep", "7200"], close_fds=False)
    assert holder_of(tmp_path) is None
    child.kill()
    child.wait()


def test_a_full_disk_costs_the_name_of_the_holder_and_never_the_lock(tmp_path, monkeypatch):
    def full(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "ftruncate", full)
    monkeypatch.setattr(os, "pwrite", full)
    with StageLock(tmp_path):
        assert holder_of(tmp_path) == "another process"
    assert holder_of(tmp_path) is None

import errno
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from prefect.locking.protocol import LockManager
from support.patience import PATIENCE_S, wait_until

from luffy.errors import StageFailed, WorkspaceError
from luffy.pipeline.lock import LOCK_FILE, FlockManager, check_locks, holder_of, is_shared, stage_lock

FLOCK = """
#include <errno.h>
#include <stdlib.h>
int flock(int descriptor, int operation) { errno = atoi(getenv("FLOCK_ERRNO")); return errno ? -1 : 0; }
"""
PREPARE = """
import os, sys
from pathlib import Path
from luffy.errors import WorkspaceError
from luffy.pipeline.workspace import Workspace
for number in sys.argv[2:]:
    os.environ["FLOCK_ERRNO"] = number
    try:
        Workspace(Path(sys.argv[1])).prepare()
    except WorkspaceError as error:
        print(error)
"""
REASONS = {
    errno.ENOLCK: "No locks available",
    errno.EOPNOTSUPP: "Operation not supported",
    0: "a second holder is not kept out",
}
MOUNTS = (
    ("/", "ext4", "rw,relatime"),
    ("/lab", "nfs4", "rw,vers=4.2,local_lock=none"),
    ("/lab/old", "nfs", "rw,vers=3,nolock,local_lock=all"),
    ("/lab/a b", "nfs", "rw,vers=3,local_lock=flock"),
    ("/mnt/ssh", "fuse.sshfs", "rw,user_id=0"),
    ("/lab/old/tmp", "tmpfs", "rw"),
    ("/mnt/bucket", "fuse.s3fs", "rw"),
)


def test_the_holder_is_known_by_its_pid(tmp_path):
    assert holder_of(tmp_path) is None
    with stage_lock(tmp_path):
        assert f"pid {os.getpid()} " in holder_of(tmp_path)
    assert holder_of(tmp_path) is None


@pytest.mark.parametrize("named", [True, False], ids=["named", "on a full disk"])
def test_a_waiter_learns_the_holder_and_gets_the_lock_when_it_is_killed(tmp_path, hold, named):
    process, told = hold(tmp_path), []
    if not named:
        (tmp_path / LOCK_FILE).write_text("")
    waiter = threading.Thread(target=lambda: stage_lock(tmp_path, told.append).__enter__())
    waiter.start()
    wait_until(lambda: told)
    assert waiter.is_alive()
    assert told == [f"pid {process.pid} on {os.uname().nodename}" if named else "another process"]
    process.kill()
    process.wait()
    waiter.join(PATIENCE_S)
    assert not waiter.is_alive()


def test_a_child_that_outlives_the_holder_does_not_keep_the_lock(tmp_path):
    with stage_lock(tmp_path):
        child = subprocess.Popen(["sleep", "7200"], close_fds=False)
    assert holder_of(tmp_path) is None
    child.kill()
    child.wait()


def test_a_full_disk_costs_the_name_of_the_holder_and_never_the_lock(tmp_path, monkeypatch):
    def full(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "ftruncate", full)
    monkeypatch.setattr(os, "pwrite", full)
    with stage_lock(tmp_path):
        assert holder_of(tmp_path) == "another process"
    assert holder_of(tmp_path) is None


def built(folder):
    """A library in which `flock` fails with the number FLOCK_ERRNO, or succeeds always, as on some network mounts."""
    source = folder / "flock.c"
    source.write_text(FLOCK)
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", source.with_suffix(".so"), source], check=True)
    return source.with_suffix(".so")


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc: apt-get install gcc libc6-dev")
def test_a_workspace_without_working_locks_is_refused_in_one_line(tmp_path):
    environment = {"LD_PRELOAD": str(built(tmp_path)), "FLOCK_ERRNO": "0", "PYTHONPATH": ":".join(sys.path)}
    command = [sys.executable, "-c", PREPARE, tmp_path / "lab", *map(str, REASONS)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for line, reason in zip(done.stdout.splitlines(), REASONS.values(), strict=True):
        assert f"{tmp_path}/lab: its file system has no working file locks (flock: {reason})" in line


@pytest.mark.parametrize(
    ("folder", "shared", "fault"),
    [
        ("/lab/workspace", True, None),
        ("/lab/old/workspace", True, "nfs with nolock"),
        ("/lab/old/tmp/workspace", False, None),
        ("/lab/a b", True, "nfs with local_lock=flock"),
        ("/mnt/ssh/workspace", True, "fuse.sshfs with rw"),
        ("/laboratory", False, None),
        ("/mnt/bucket", False, None),
    ],
)
def test_a_mount_whose_locks_end_at_the_machine_is_refused(tmp_path, monkeypatch, folder, shared, fault):
    mounts = [SimpleNamespace(mountpoint=point, fstype=kind, opts=options) for point, kind, options in MOUNTS]
    monkeypatch.setattr(psutil, "disk_partitions", lambda **which: mounts)
    assert is_shared(Path(folder)) is shared
    monkeypatch.setattr("tempfile.NamedTemporaryFile", lambda **place: (tmp_path / "probe").open("w"))
    (tmp_path / "probe").touch()
    if fault is None:
        check_locks(Path(folder))
    else:
        with pytest.raises(WorkspaceError, match=f"other machines do not see those of {fault}"):
            check_locks(Path(folder))


TAKE = """
import sys
from pathlib import Path
from luffy.pipeline.lock import FlockManager
FlockManager(Path(sys.argv[1]), print).acquire_lock("rl/0f/record.json", "one")
print("locked", flush=True)
sys.stdin.read()
"""


def test_the_lock_of_a_record_is_free_again_when_its_holder_is_killed(tmp_path):
    told: list[str] = []
    manager = FlockManager(tmp_path, told.append)
    assert isinstance(manager, LockManager)
    process = subprocess.Popen(
        [sys.executable, "-c", TAKE, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "locked\n"
    assert manager.is_locked("rl/0f/record.json") and not manager.is_locked("rl/0e/record.json")
    assert not manager.acquire_lock("rl/0f/record.json", "two", acquire_timeout=0.0)
    taking = threading.Thread(target=lambda: manager.acquire_lock("rl/0f/record.json", "two"))
    taking.start()
    wait_until(lambda: told)
    process.kill()
    process.wait()
    taking.join(PATIENCE_S)
    assert manager.is_lock_holder("rl/0f/record.json", "two")
    assert len(told) == 1 and f"pid {process.pid} on " in told[0]
    manager.release_lock("rl/0f/record.json", "two")
    assert manager.wait_for_lock("rl/0f/record.json")


def test_two_threads_of_a_process_exclude_each_other_and_a_stopped_one_gives_up(tmp_path):
    stopped = threading.Event()
    manager = FlockManager(tmp_path, lambda holder: stopped.set(), stopped.is_set)
    assert manager.acquire_lock("sft/1/record.json", "a") and manager.acquire_lock("sft/1/record.json", "a")
    with pytest.raises(StageFailed, match="interrupted while waiting"):
        manager.acquire_lock("sft/1/record.json", "b")

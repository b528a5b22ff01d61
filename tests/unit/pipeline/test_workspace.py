"""Where a workspace may lie, the locks that its processes hold, and what manifests and events say."""

import errno
import fcntl
import json
import os
import shutil
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prefect.locking.protocol import LockManager
from support.patience import PATIENCE_S, wait_until
from support.refusals import refused
from synthetic.finished_stages import finish

from luffy.errors import LuffyError, StageFailed, WorkspaceError
from luffy.pipeline.disk import usable
from luffy.pipeline.events import Event, EventReader, EventWriter, seconds_of_attempts
from luffy.pipeline.lock import LOCK_FILE, FlockManager, check_locks, holder_of, is_shared, stage_lock
from luffy.pipeline.manifest import (
    collect_outputs,
    consumed_digest,
    finished_manifest,
    read_manifest,
    uncommitted_changes,
)
from luffy.pipeline.workspace import claiming, find_workspace, link

# ---- the folder ----


def test_the_argument_wins_over_the_environment_over_the_default(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LUFFY_WORKSPACE", raising=False)
    assert find_workspace().root == tmp_path / "workspace"
    monkeypatch.setenv("LUFFY_WORKSPACE", str(tmp_path / "env"))
    assert find_workspace().root == tmp_path / "env"
    assert find_workspace(tmp_path / "given").root == tmp_path / "given"


def test_runs_are_numbered_without_a_clash(workspace):
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda n: workspace.new_run("exp", {"n": n}), range(20)))
    assert sorted(path.name for path in found) == sorted(f"exp-{n}" for n in range(1, 21))
    assert sorted(json.loads((path / "run.json").read_text())["n"] for path in found) == list(range(20))
    workspace.new_run("other-large", {})
    assert workspace.new_run("other", {}).name == "other-1", "its name begins like that of another experiment"
    for target in found[:2]:
        link(target, workspace.runs / "stages" / "rl")
    assert (workspace.runs / "stages/rl").readlink() == Path("..") / found[1].name


@pytest.mark.parametrize(
    ("root", "reason"),
    [
        ("/proc/luffy", ""),
        ("/dev/null/luffy", ""),
        ("/dev/full", ""),
        ("file", "/file is not a folder"),
        ("file/below", "/file is not a folder"),
        ("w" * 300, "File name too long"),
        ("~nobody-of-that-name/w", "home directory"),
        ("circle", "Symlink loop from "),
        ("circle/below/w", "Symlink loop from "),
        (os.fsdecode(b"/tmp/\xff"), "not UTF-8"),
        ("runs-away", "/runs is not a folder"),
        ("stages-away", "/stages is not a folder"),
        pytest.param(
            "read-only/w",
            "",
            marks=pytest.mark.skipif(
                os.geteuid() == 0, reason="needs a user other than root, who may write everywhere"
            ),
        ),
    ],
)
def test_a_place_that_is_no_folder_or_cannot_be_written_is_refused(tmp_path, monkeypatch, root, reason):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "circle").symlink_to("circle")
    (tmp_path / "file").touch()
    (tmp_path / "read-only").mkdir(0o500)
    for folder in ("runs", "stages"):  # on a disk that is away
        (tmp_path / f"{folder}-away").mkdir()
        (tmp_path / f"{folder}-away" / folder).symlink_to("/disk-that-is-away/luffy")
    with refused("workspace ", "cannot be written (", reason, "give another", error=WorkspaceError):
        find_workspace(root).prepare()


@pytest.mark.parametrize(("number", "remedy"), [(errno.EACCES, "give another"), (errno.ENOSPC, "free space")])
def test_only_a_full_disk_is_to_be_emptied(number, remedy):
    words = os.strerror(number)
    with refused(f"workspace: /x: {words}", remedy, error=WorkspaceError), usable(Path("/y")):
        raise OSError(number, words, "/x")


# ---- locks ----


def test_the_holder_is_known_by_its_pid_and_no_child_of_it_keeps_the_lock(tmp_path):
    assert holder_of(tmp_path) is None
    with stage_lock(tmp_path):
        assert f"pid {os.getpid()} " in holder_of(tmp_path)
        child = subprocess.Popen(["sleep", "7200"], close_fds=False)
    assert holder_of(tmp_path) is None
    child.kill()
    child.wait()


HOLD = """
import sys
from pathlib import Path
from luffy.pipeline.lock import stage_lock
with stage_lock(Path(sys.argv[1])):
    print("locked", flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("named", [True, False], ids=["named", "on a full disk"])
def test_a_waiter_learns_the_holder_and_gets_the_lock_when_it_is_killed(tmp_path, started, named):
    (process, _), told = started(HOLD, tmp_path), []
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


def test_waiting_for_a_stage_that_is_then_deleted_is_an_error(tmp_path):
    directory, waits = tmp_path / "stage", threading.Event()
    directory.mkdir()
    with ThreadPoolExecutor(1) as pool, stage_lock(directory):
        waiter = pool.submit(stage_lock(directory, waiting=lambda holder: waits.set()).__enter__)
        assert waits.wait(PATIENCE_S)
        directory.rename(tmp_path / ".trash-stage")
    assert "was deleted while this process waited for its lock" in str(waiter.exception())


def test_a_full_disk_costs_the_name_of_the_holder_and_never_the_lock(tmp_path, monkeypatch):
    def full(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "ftruncate", full)
    monkeypatch.setattr(os, "pwrite", full)
    with stage_lock(tmp_path):
        assert holder_of(tmp_path) == "another process"
    assert holder_of(tmp_path) is None


def test_a_claim_locks_a_file_that_is_open_for_reading(workspace):
    """NFS refuses a shared lock of any other."""
    workspace.prepare()
    with claiming(workspace):
        (held,) = (file for file in Path("/proc/self/fd").iterdir() if file.resolve().name == ".claims.lock")
        assert fcntl.fcntl(int(held.name), fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDWR


FLOCK = """
#include <errno.h>
#include <stdlib.h>
int flock(int descriptor, int operation) { errno = atoi(getenv("FLOCK_ERRNO")); return errno ? -1 : 0; }
"""
"""A library in which `flock` fails with the number FLOCK_ERRNO, or succeeds always, as on some network mounts."""
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


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc: apt-get install gcc libc6-dev")
def test_a_workspace_without_working_locks_is_refused_in_one_line(tmp_path):
    source, library = tmp_path / "flock.c", tmp_path / "flock.so"
    source.write_text(FLOCK)
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, source], check=True)
    environment = {"LD_PRELOAD": str(library), "FLOCK_ERRNO": "0", "PYTHONPATH": ":".join(sys.path)}
    command = [sys.executable, "-c", PREPARE, tmp_path / "lab", *map(str, REASONS)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for line, reason in zip(done.stdout.splitlines(), REASONS.values(), strict=True):
        assert f"{tmp_path}/lab: its file system has no working file locks (flock: {reason})" in line


MOUNTS = (
    ("/", "ext4", "rw,relatime"),
    ("/lab", "nfs4", "rw,vers=4.2,local_lock=none"),
    ("/lab/old", "nfs", "rw,vers=3,nolock,local_lock=all"),
    ("/lab/a b", "nfs", "rw,vers=3,local_lock=flock"),
    ("/mnt/ssh", "fuse.sshfs", "rw,user_id=0"),
    ("/lab/old/tmp", "tmpfs", "rw"),
    ("/mnt/bucket", "fuse.s3fs", "rw"),
)


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
        with refused(f"other machines do not see those of {fault}", error=WorkspaceError):
            check_locks(Path(folder))


TAKE = """
import sys
from pathlib import Path
from luffy.pipeline.lock import FlockManager
FlockManager(Path(sys.argv[1]), print).acquire_lock("rl/0f/record.json", "one")
print("locked", flush=True)
sys.stdin.read()
"""


def test_the_lock_of_a_record_is_free_again_when_its_holder_is_killed(tmp_path, started):
    (process, _), told = started(TAKE, tmp_path), []
    manager = FlockManager(tmp_path, told.append)
    assert isinstance(manager, LockManager)
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


# ---- manifests ----


def test_folders_are_expanded_and_hashed_and_of_a_model_only_its_folder_is_consumed(opened, tmp_path):
    done = finish(opened(), "prepare_data")
    manifest = finished_manifest(done.directory)
    assert [output.path for output in manifest.outputs] == ["metrics.jsonl", "model/weights"]
    assert all(len(output.sha256) == 64 for output in manifest.outputs)
    fewer = manifest.model_copy(update={"outputs": manifest.outputs[1:]})
    assert consumed_digest("model", manifest) == consumed_digest("model", fewer)
    assert consumed_digest("data", manifest) != consumed_digest("data", fewer)
    with pytest.raises(LuffyError, match="model: the stage lists it"):
        collect_outputs(tmp_path, ("model",))
    (done.directory / "manifest.json").write_text("{")
    assert read_manifest(done.directory) is None


def test_what_was_not_committed_can_be_restored(tmp_path, monkeypatch):
    repository = tmp_path / "mine"
    (repository / "workspace").mkdir(parents=True)
    monkeypatch.chdir(repository)

    def git(*arguments: str) -> None:
        own = ("-c", "user.name=A", "-c", "user.email=a@b.c")
        subprocess.run(["git", *own, *arguments], cwd=repository, check=True, capture_output=True)

    (repository / "losses.py").write_text("FACTOR = 1\n")
    assert "mine" not in uncommitted_changes(repository / "workspace")
    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "first")
    (repository / "losses.py").write_text("FACTOR = 2\n")
    (repository / "new.py").write_text("x = 'ä'\n")
    (repository / "rows.parquet").write_bytes(b"\0" * 100)
    (repository / "workspace" / "job.yaml").write_text("a: 1\n")
    patch = uncommitted_changes(repository / "workspace")["mine"]
    (tmp_path / "patch").write_bytes(patch)
    git("reset", "-q", "--hard")
    (repository / "new.py").unlink()
    git("apply", str(tmp_path / "patch"))
    assert (repository / "losses.py").read_text() == "FACTOR = 2\n"
    assert (repository / "new.py").read_text() == "x = 'ä'\n"
    assert b"job.yaml" not in patch and b"rows.parquet" not in patch
    git("add", ".")
    git("commit", "-qm", "second")
    assert "mine" not in uncommitted_changes(repository / "workspace")


# ---- events ----


def test_progress_is_written_four_times_a_second_and_always_first_and_last(tmp_path):
    now = [0.0]
    writer = EventWriter(tmp_path / "e", clock=lambda: now[0])
    for step in range(1, 101):
        writer.progress(step, 100, loss=0.5)
        now[0] += 0.01
    found = EventReader(tmp_path / "e").read()
    assert [event.step for event in found] == [1, 26, 51, 76, 100]
    assert {(event.kind, event.total, event.metrics["loss"]) for event in found} == {("progress", 100, 0.5)}


def test_reader_returns_only_new_and_complete_events(tmp_path):
    path = tmp_path / "events.jsonl"
    reader = EventReader(path)
    assert reader.read() == []
    EventWriter(path).message("one")
    assert [event.text for event in reader.read()] == ["one"]
    with path.open("a") as file:
        file.write('{"kind": "message", "time": 1, "pid": 1')
    assert reader.read() == []
    with path.open("a") as file:
        file.write(', "text": "two"}\n{"kind": "progress", "ti')
    assert [event.text for event in reader.read()] == ["two"]
    later = EventReader(path, from_end=True)
    EventWriter(path).message("after a kill")  # which has torn the line before
    assert [event.text for event in reader.read()] == [event.text for event in later.read()] == ["after a kill"]


def test_an_attempt_lasts_until_its_own_last_event_and_goes_on_with_earlier_ones(tmp_path):
    now = [100.0]
    writer = EventWriter(tmp_path / "e", clock=lambda: now[0])
    assert seconds_of_attempts([]) == 0.0
    writer.started(earlier_s=7.0)
    now[0] += 20.0
    writer.progress(4, 10)
    events = EventReader(tmp_path / "e").read()
    others = [Event("waiting", now[0] + 500.0, pid) for pid in (os.getpid(), os.getpid() + 1)]
    assert seconds_of_attempts([*events, *others]) == 27.0
    failed, reused = (Event(kind, now[0] + later, os.getpid()) for kind, later in (("failed", 1.0), ("finished", 9.0)))
    assert seconds_of_attempts([*events, failed, reused]) == 28.0  # in containers every process may have this pid
    assert seconds_of_attempts([*events, Event("started", 900.0, 1)]) == 0.0  # has cleared what was there


@given(st.text())
def test_any_text_stays_on_one_line_and_is_read_as_written(tmp_path_factory, text):
    path = tmp_path_factory.mktemp("events") / "e"
    EventWriter(path).tell("failed", text)
    assert len(path.read_bytes().split(b"\n")) == 2
    (event,) = EventReader(path).read()
    assert (event.kind, event.text) == ("failed", text)

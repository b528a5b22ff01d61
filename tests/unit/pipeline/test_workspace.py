"""Where a workspace may lie, the locks that its processes hold, and what manifests and events say."""

import errno
import fcntl
import json
import os
import shutil
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
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
from luffy.pipeline import manifest as manifests
from luffy.pipeline.disk import usable
from luffy.pipeline.events import Event, EventReader, EventWriter, seconds_of_attempts
from luffy.pipeline.experiment import start_run
from luffy.pipeline.lock import LOCK_FILE, FlockManager, check_locks, holder_of, is_shared, stage_lock
from luffy.pipeline.manifest import consumed_digest, finished_manifest, uncommitted_changes
from luffy.pipeline.workspace import claiming, find_workspace, link

# ---- the folder ----


def test_the_argument_wins_over_the_environment_over_the_default(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for chosen, found in (("", "workspace"), (str(tmp_path / "env"), "env")):
        monkeypatch.setenv("LUFFY_WORKSPACE", chosen)
        assert find_workspace().root == tmp_path / found
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


NO_PLACE = {
    "/proc/luffy": "",
    "/dev/null/luffy": "",
    "/dev/full": "",
    "file": "/file is not a folder",
    "file/below": "/file is not a folder",
    "w" * 300: "File name too long",
    "~nobody-of-that-name/w": "home directory",
    "circle": "Symlink loop from ",
    "circle/below/w": "Symlink loop from ",
    os.fsdecode(b"/tmp/\xff"): "not UTF-8",
    "runs-away": "/runs is not a folder",
    "stages-away": "/stages is not a folder",
    "read-only/w": "",
}


@pytest.mark.parametrize(("root", "reason"), NO_PLACE.items())
def test_a_place_that_is_no_folder_or_cannot_be_written_is_refused(tmp_path, monkeypatch, root, reason):
    if root.startswith("read-only") and os.geteuid() == 0:
        pytest.skip("needs a user other than root, who may write everywhere")
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


@pytest.mark.parametrize("named", [True, False], ids=["named", "on a full disk"])
def test_a_waiter_learns_the_holder_and_gets_the_lock_when_it_is_killed(tmp_path, holding, named):
    (process, _), told = holding("lock.stage_lock(place)", tmp_path), []
    if not named:
        (tmp_path / LOCK_FILE).write_text("")
    waiter = threading.Thread(target=lambda: stage_lock(tmp_path, told.append).__enter__())
    waiter.start()
    wait_until(lambda: told)
    assert waiter.is_alive()
    assert told == [f"pid {process.pid} on {os.uname().nodename}" if named else "another process"]
    process.kill()
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

    for call in ("ftruncate", "pwrite"):
        monkeypatch.setattr(os, call, full)
    with stage_lock(tmp_path):
        assert holder_of(tmp_path) == "another process"
    assert holder_of(tmp_path) is None


def test_a_claim_locks_a_file_that_is_open_for_reading(workspace):
    """NFS refuses a shared lock of any other."""
    workspace.prepare()
    with claiming(workspace):
        (held,) = (file for file in Path("/proc/self/fd").iterdir() if file.resolve().name == ".claims.lock")
        assert fcntl.fcntl(int(held.name), fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDWR


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, 0])
def test_a_workspace_without_working_locks_is_refused_in_one_line(workspace, monkeypatch, number):
    """With a `flock` that fails, or succeeds always, as on some network mounts."""

    def flock(file, operation):
        if number:
            raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    reason = f"(flock: {os.strerror(number) if number else 'a second holder is not kept out'})"
    with refused(f"{workspace.root}: its file system has no working file locks {reason}", error=WorkspaceError):
        workspace.prepare()


MOUNTS = {
    "/": ("ext4", "rw,relatime"),
    "/lab": ("nfs4", "rw,vers=4.2,local_lock=none"),
    "/lab/old": ("nfs", "rw,vers=3,nolock,local_lock=all"),
    "/lab/a b": ("nfs", "rw,vers=3,local_lock=flock"),
    "/mnt/ssh": ("fuse.sshfs", "rw,user_id=0"),
    "/lab/old/tmp": ("tmpfs", "rw"),
    "/mnt/bucket": ("fuse.s3fs", "rw"),
}
PLACES = [
    ("/lab/workspace", True, None),
    ("/lab/old/workspace", True, "nfs with nolock"),
    ("/lab/old/tmp/workspace", False, None),
    ("/lab/a b", True, "nfs with local_lock=flock"),
    ("/mnt/ssh/workspace", True, "fuse.sshfs with rw"),
    ("/laboratory", False, None),
    ("/mnt/bucket", False, None),
    ("/below/chroot", False, None),
]


@pytest.mark.parametrize(("folder", "shared", "fault"), PLACES)
def test_a_mount_whose_locks_end_at_the_machine_is_refused(tmp_path, monkeypatch, folder, shared, fault):
    mounts = [SimpleNamespace(mountpoint=point, fstype=kind, opts=how) for point, (kind, how) in MOUNTS.items()]
    mounts = [] if folder == "/below/chroot" else mounts
    monkeypatch.setattr(psutil, "disk_partitions", lambda **which: mounts)
    assert is_shared(Path(folder)) is shared
    monkeypatch.setattr("tempfile.NamedTemporaryFile", lambda **place: (tmp_path / "probe").open("w"))
    (tmp_path / "probe").touch()
    expected = refused(f"other machines do not see those of {fault}", error=WorkspaceError)
    with expected if fault else nullcontext():
        check_locks(Path(folder))


def test_the_lock_of_a_record_is_free_again_when_its_holder_is_killed(tmp_path, holding):
    taken = "nullcontext(lock.FlockManager(place, print).acquire_lock('rl/0f/record.json', 'one'))"
    (process, _), told = holding(taken, tmp_path), []
    manager = FlockManager(tmp_path, told.append)
    assert isinstance(manager, LockManager)
    assert manager.is_locked("rl/0f/record.json") and not manager.is_locked("rl/0e/record.json")
    assert not manager.acquire_lock("rl/0f/record.json", "two", acquire_timeout=0.0)
    taking = threading.Thread(target=lambda: manager.acquire_lock("rl/0f/record.json", "two"))
    taking.start()
    wait_until(lambda: told)
    process.kill()
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
        manifests.collect_outputs(tmp_path, ("model",))
    (done.directory / "manifest.json").write_text("{")
    assert manifests.read_manifest(done.directory) is None


@pytest.fixture
def repository(tmp_path, monkeypatch) -> Path:
    """The working directory: a git repository, in which one file is private."""
    folder = tmp_path / "mine"
    (folder / "workspace").mkdir(parents=True)
    monkeypatch.chdir(folder)
    assert "mine" not in uncommitted_changes(folder / "workspace"), "no repository yet"
    for name in ("a.py", "same.py", "drawn.txt", "filtered.txt", "keys.env"):
        (folder / name).write_text("one\n")
    (folder / "keys.env").chmod(0o600)
    git("init -q", "add .", "commit -qm 1")
    return folder


def git(*commands):
    for arguments in commands:
        command = ["git", "-c", "user.name=A", "-c", "user.email=a@b.c", *arguments.split()]
        subprocess.run(command, check=True, capture_output=True)


def test_what_was_not_committed_can_be_restored(repository, tmp_path):
    (repository / "a.py").write_text("FACTOR = 2\n")
    (repository / "new.py").write_text("x = 'ä'\n")
    (repository / "rows.parquet").write_bytes(b"\0" * 100)
    (repository / "workspace" / "job.py").write_text("a: 1\n")
    patch = uncommitted_changes(repository / "workspace")["mine"]
    (tmp_path / "patch").write_bytes(patch)
    (repository / "new.py").unlink()
    git("reset -q --hard", f"apply {tmp_path}/patch")
    assert [(repository / name).read_text() for name in ("a.py", "new.py")] == ["FACTOR = 2\n", "x = 'ä'\n"]
    assert b"job.py" not in patch and b"rows.parquet" not in patch
    git("add .", "commit -qm second")
    assert "mine" not in uncommitted_changes(repository / "workspace")


def test_two_repositories_of_one_name_each_have_a_patch(repository, tmp_path, monkeypatch):
    code = tmp_path / "code" / "mine"
    shutil.copytree(repository, code)
    monkeypatch.setattr(manifests, "_REPOSITORY", code)
    for folder, line in ((code, "x = 'code'"), (repository, "x = 'here'")):
        (folder / "a.py").write_text(f"{line}\n")
    patches = uncommitted_changes(repository / "workspace")
    assert patches.keys() == {"mine", "mine_2"}
    assert b"'code'" in patches["mine"] and b"'here'" in patches["mine_2"]


RUNS_PROGRAMS = """
[core]
    fsmonitor = "touch {mark}; false"
    hooksPath = {hooks}
[diff]
    external = touch {mark}
[diff "mine"]
    command = touch {mark}
    textconv = touch {mark}; cat
[filter "mine"]
    clean = touch {mark}; cat
    process = touch {mark}
"""


def test_a_repository_of_others_runs_no_program(repository, tmp_path):
    mark, hooks = tmp_path / "ran", tmp_path / "hooks"
    hooks.mkdir()
    (hooks / "post-index-change").write_text(f"#!/bin/sh\ntouch {mark}\n")
    (hooks / "post-index-change").chmod(0o700)
    (repository / ".gitattributes").write_text("drawn.txt diff=mine\nf*ed.* filter=mine\n")
    (repository / "fetched.py").write_text("unknown to git\n")
    with (repository / ".git/config").open("a") as config:
        config.write(RUNS_PROGRAMS.format(mark=mark, hooks=hooks))
    for name in ("a.py", "drawn.txt", "filtered.txt"):
        (repository / name).write_text("two\n")  # as long as before: git compares the contents, by filters
    os.utime(repository / "same.py", (1, 1))  # as after unpacking: git then looks at all files again
    patch = uncommitted_changes(repository / "workspace")["mine"]
    assert b"same.py" not in patch and b"fetched.py" not in patch
    assert not mark.exists()
    assert b"a.py" in patch and b"drawn.txt" in patch
    subprocess.run(["git", "diff"], capture_output=True)
    assert mark.exists(), "git itself runs them"


def test_of_what_git_does_not_know_only_code_that_all_may_read_is_kept(repository, opened):
    (repository / "new.py").write_text("new = 1\n")
    for name in ("keys.env", "private.py", "env.sh", "own.toml", "own.yaml"):
        (repository / name).write_text("canary\n")
    (repository / "private.py").chmod(0o600)
    with start_run(opened()) as run:
        patch = run.directory / "uncommitted-mine.patch"
        assert patch.stat().st_mode & 0o777 == 0o600
        assert "new = 1" in patch.read_text() and "canary" not in patch.read_text()


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

"""Locks by `flock`, which the kernel frees when their holder dies, whatever ends it.

They work on one machine, and on file systems that pass them on to the others. `check_locks` refuses a workspace where
they do not.
"""

import fcntl
import math
import os
import socket
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path

import psutil

from luffy.errors import EXIT_INTERRUPTED, LuffyError, StageFailed, WorkspaceError

LOCK_FILE = ".lock"
_POLL_S = 0.2
_NFS = ("nolock", "local_lock=all", "local_lock=flock")
_SHARED: dict[str, tuple[str, ...]] = {
    "nfs": _NFS,
    "nfs4": _NFS,
    "lustre": ("localflock",),
    "ocfs2": ("localflocks",),
    "cifs": ("nobrl",),
    "smb3": ("nobrl",),
    "fuse.sshfs": ("rw", "ro"),
    "ceph": (),
    "gfs2": (),
    "gpfs": (),
    "beegfs": (),
}
"""File systems of several machines, and the mount options with which the kernel keeps locks to itself: nfs(5),
mount.lustre(8), mount.ocfs2(8), mount.cifs(8). sshfs always does."""


@contextmanager
def stage_lock(directory: Path, waiting: Callable[[str], None] = lambda holder: None) -> Iterator[None]:
    """Holds the lock of `directory` while inside; raises LuffyError when it is deleted meanwhile.

    `waiting` is called with the name of the holder ("pid 17 on host") once for each holder that is waited for.
    """
    path = directory / LOCK_FILE
    # Python closes it in children: one that outlives the stage must not keep the lock.
    # Others may read who holds it, and not take it from us.
    with open(path, "a+b", opener=partial(os.open, mode=0o644)) as file:
        descriptor = file.fileno()
        _wait(descriptor, waiting)
        try:
            is_still = os.path.samestat(path.stat(), os.fstat(descriptor))
        except FileNotFoundError:
            is_still = False
        if not is_still:
            raise LuffyError(f"{directory}: was deleted while this process waited for its lock; start again")
        _write_name(descriptor, held=True)
        try:
            yield
        finally:
            _write_name(descriptor, held=False)


def _wait(
    descriptor: int,
    waiting: Callable[[str], None],
    stopped: Callable[[], bool] = lambda: False,
    deadline: float = math.inf,
) -> bool:
    """Whether the lock was free before `deadline`, a time of the monotonic clock; StageFailed once `stopped`."""
    announced = ""
    while not try_lock(descriptor):
        if stopped():
            raise StageFailed("interrupted while waiting; the same command resumes it", EXIT_INTERRUPTED)
        if time.monotonic() >= deadline:
            return False
        time.sleep(_POLL_S)
        if try_lock(descriptor):  # somebody had only looked who holds it
            break
        holder = _name_in(descriptor) or announced or "another process"  # on a full disk it has no name
        if holder != announced:
            waiting(holder)
            announced = holder
    return True


@contextmanager
def lock_if_free(directory: Path) -> Iterator[bool]:
    """Holds the lock of `directory` inside the block if it is free; yields whether it is held. Creates no file."""
    try:
        file = (directory / LOCK_FILE).open("r+b")
    except PermissionError:
        raise
    except OSError:
        yield True  # no stage has ever begun here
        return
    with file:
        yield try_lock(file.fileno())


def holder_of(directory: Path) -> str | None:
    """Who works in `directory` ("pid 17 on host"): the holder of its lock; None where it is free."""
    try:
        with (directory / LOCK_FILE).open("rb") as file:
            is_free = try_lock(file.fileno(), fcntl.LOCK_SH)
            return None if is_free else _name_in(file.fileno()) or "another process"
    except PermissionError:
        raise
    except OSError:  # no stage has ever begun here; the place may be a file's, or a link's to itself
        return None


class FlockManager:
    """Prefect's lock manager (`prefect.locking.protocol.LockManager`) for records of results, one file a record.

    Prefect's own file lock outlives a `kill -9` of its holder, after which every later run would wait for ever.

    Args:
        folder: Where the files are, such as `rl-0f3a….lock` for the record `rl/0f3a…/record.json`.
        waiting: Called with the name of each holder that is waited for.
        stopped: Whether to give up waiting, which raises StageFailed.
    """

    def __init__(
        self, folder: Path, waiting: Callable[[str], None], stopped: Callable[[], bool] = lambda: False
    ) -> None:
        self._folder = folder
        self._waiting = waiting
        self._stopped = stopped
        # By key and holder: threads of one process exclude each other, too, and Prefect ignores a refusal.
        self._held: dict[tuple[str, str], int] = {}

    def acquire_lock(
        self, key: str, holder: str, acquire_timeout: float | None = None, hold_timeout: float | None = None
    ) -> bool:
        """Hold the lock of the record `key`; whether that succeeded within `acquire_timeout` seconds (None: ever)."""
        if (key, holder) in self._held:
            return True
        self._folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self._path(key), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        with ExitStack() as on_failure:
            on_failure.callback(os.close, descriptor)
            deadline = math.inf if acquire_timeout is None else time.monotonic() + acquire_timeout
            if not _wait(descriptor, self._waiting, self._stopped, deadline):
                return False
            on_failure.pop_all()
        _write_name(descriptor, held=True)
        self._held[key, holder] = descriptor
        return True

    def release_lock(self, key: str, holder: str) -> None:
        """Free the record `key` if `holder` holds its lock; Prefect asks several times for that of a nested task."""
        if (descriptor := self._held.pop((key, holder), None)) is not None:
            _write_name(descriptor, held=False)
            os.close(descriptor)

    def is_lock_holder(self, key: str, holder: str) -> bool:
        return (key, holder) in self._held

    def is_locked(self, key: str) -> bool:
        return not self.wait_for_lock(key, timeout=0.0)

    def wait_for_lock(self, key: str, timeout: float | None = None) -> bool:
        """Whether the record `key` became free within `timeout` seconds (None: wait for ever)."""
        if not self._path(key).exists():
            return True
        free = self.acquire_lock(key, "", timeout)
        if free:
            self.release_lock(key, "")
        return free

    async def aacquire_lock(
        self, key: str, holder: str, acquire_timeout: float | None = None, hold_timeout: float | None = None
    ) -> bool:
        """`acquire_lock`, for Prefect's asynchronous callers."""
        return await _in_thread(self.acquire_lock, key, holder, acquire_timeout, hold_timeout)

    async def await_for_lock(self, key: str, timeout: float | None = None) -> bool:
        """`wait_for_lock`, for Prefect's asynchronous callers."""
        return await _in_thread(self.wait_for_lock, key, timeout)

    def _path(self, key: str) -> Path:
        return self._folder / f"{key.rpartition('/')[0].replace('/', '-')}.lock"


def _in_thread(wait: Callable[..., bool], *arguments: object) -> Awaitable[bool]:
    from asyncio import to_thread  # late: Prefect loads it while its server starts

    return to_thread(wait, *arguments)


def check_locks(folder: Path) -> None:
    """Raise WorkspaceError where `flock` does not keep a second process out, here or on another machine."""
    fault: str | None = "a second holder is not kept out"
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".probe.") as probe, Path(probe.name).open("r+b") as second:
        try:
            fcntl.flock(probe, fcntl.LOCK_EX | fcntl.LOCK_NB)
            fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            fault = None
        except OSError as error:
            fault = error.strerror
    kind, options = _mount_of(folder.resolve())
    local = [option for option in _SHARED.get(kind, ()) if option in options]
    if fault is None and local:
        fault = f"other machines do not see those of {kind} with {local[0]}"
    if fault is not None:
        raise WorkspaceError(
            f"workspace {folder}: its file system has no working file locks (flock: {fault}), so two runs could write "
            "one result; mount it with locks that all machines see, or give another with --workspace"
        )


def is_shared(folder: Path) -> bool:
    """Whether other machines may write there, by the kind of its file system."""
    return _mount_of(folder.resolve())[0] in _SHARED


def _mount_of(folder: Path) -> tuple[str, list[str]]:
    """Kind and options of the file system; the last of several mounts at one point covers the others."""
    above = [each for each in psutil.disk_partitions(all=True) if folder.is_relative_to(each.mountpoint)]
    above.sort(key=lambda each: len(Path(each.mountpoint).parts))
    return (above[-1].fstype, above[-1].opts.split(",")) if above else ("", [])  # below chroot(2) there may be none


def try_lock(descriptor: int, mode: int = fcntl.LOCK_EX) -> bool:
    """Whether the lock of the open file was free; it is held then."""
    try:
        fcntl.flock(descriptor, mode | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _write_name(descriptor: int, *, held: bool) -> None:
    """Put this process's name into the file, for those who wait; a full disk costs the name, never the lock."""
    with suppress(OSError):
        os.ftruncate(descriptor, 0)
        if held:
            os.pwrite(descriptor, f"pid {os.getpid()} on {socket.gethostname()}".encode(), 0)


def _name_in(descriptor: int) -> str:
    return os.pread(descriptor, 256, 0).decode(errors="replace")

"""One process at a time in the directory of a stage or a run: `flock` on a file in it, freed by the holder's death.

`flock` works on one machine, and on network file systems that pass it on.
"""

import fcntl
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import TracebackType

from luffy.errors import LuffyError
from luffy.pipeline.workspace.lease import foreign_holder

LOCK_FILE = ".lock"
_POLL_S = 0.2


class StageLock:
    """Context manager: holds the lock of `directory` while inside; raises LuffyError when it is deleted meanwhile.

    `waiting` is called with the name of the holder ("pid 17 on host") once for each holder that is waited for.
    """

    def __init__(self, directory: Path, waiting: Callable[[str], None] = lambda holder: None) -> None:
        self._path = directory / LOCK_FILE
        self._waiting = waiting
        self._descriptor: int | None = None

    def __enter__(self) -> "StageLock":
        # Close-on-exec: a child that outlives the stage must not keep the lock.
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        with ExitStack() as on_failure:
            on_failure.callback(os.close, descriptor)
            self._wait(descriptor)
            if not _is_still(self._path, descriptor):
                raise LuffyError(
                    f"{self._path.parent}: was deleted while this process waited for its lock; start again"
                )
            on_failure.pop_all()
        _write_name(descriptor, _own_name())
        self._descriptor = descriptor
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._descriptor is not None:
            _write_name(self._descriptor, "")
            os.close(self._descriptor)
            self._descriptor = None

    def _wait(self, descriptor: int) -> None:
        announced: str | None = None
        while not _try_lock(descriptor):
            time.sleep(_POLL_S)
            holder = _name_in(descriptor) or announced or "another process"  # on a full disk it has no name
            if holder != announced:
                self._waiting(holder)
                announced = holder


@contextmanager
def lock_if_free(directory: Path) -> Iterator[bool]:
    """Holds the lock of `directory` inside the block if it is free; yields whether it is held. Creates no file.

    It is not free where another machine has left a lease, since its process may live.
    """
    if foreign_holder(directory) is not None:
        yield False
        return
    try:
        descriptor = os.open(directory / LOCK_FILE, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        yield True  # no stage has ever begun here
        return
    try:
        yield _try_lock(descriptor)
    finally:
        os.close(descriptor)


def holder_of(directory: Path) -> str | None:
    """Who works in `directory` ("pid 17 on host"): the holder of its lock, or of another machine's lease; else None."""
    if (elsewhere := foreign_holder(directory)) is not None:
        return elsewhere
    try:
        descriptor = os.open(directory / LOCK_FILE, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        if _try_lock(descriptor, fcntl.LOCK_SH):
            return None
        return _name_in(descriptor) or "another process"
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int, mode: int = fcntl.LOCK_EX) -> bool:
    try:
        fcntl.flock(descriptor, mode | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_still(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _own_name() -> str:
    return f"pid {os.getpid()} on {socket.gethostname()}"


def _write_name(descriptor: int, name: str) -> None:
    """Put the holder's name into the file, for those who wait; a full disk costs the name, never the lock."""
    with suppress(OSError):
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, name.encode(), 0)


def _name_in(descriptor: int) -> str:
    return os.pread(descriptor, 256, 0).decode(errors="replace")

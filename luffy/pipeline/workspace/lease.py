"""The lease of a stage's directory, which keeps other machines out where they may not see its lock.

Leases are numbered files in a folder, and the highest number is the valid one. To take a lease, a process creates the
next file: the file system lets only one process succeed, and no earlier holder writes to that file. The holder renews
its file until it ends. Another machine takes over once the file says that its holder has ended, or once it has watched
the file for a while without seeing a renewal: it compares the file with its earlier contents, not with a clock. A
holder that finds a higher number, or that has not renewed its own lease for that long, has to end at once.
"""

import contextlib
import errno
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from luffy.files import write_atomic
from luffy.pipeline.workspace.process_start import boot_id

LEASE_FOLDER = ".lease"
_POLL_S = 0.2
_LOOK_S = 1.0
_DELETED = (errno.ENOENT, errno.ESTALE)
"""Errors of reading a file that the holder of a higher number has deleted; ESTALE comes from NFS, for an open file."""
_LONGEST_GAP_S = 5.0
"""Longest gap between two looks at a lease. After a longer one the watch starts over: the disk was unavailable to this
machine, and perhaps to the holder as well."""


def time_since_boot() -> float:
    """Seconds since boot, including those in which the machine was suspended."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


@dataclass(frozen=True, slots=True)
class Renewal:
    """How often a lease is renewed, and how long it stays valid without a renewal."""

    every_s: float = 10.0
    expiry_s: float = 90.0
    """Longer than NFS keeps attributes without asking its server (60 s)."""


_RENEWAL = Renewal()


@dataclass(frozen=True, slots=True)
class Lease:
    """The contents of a file."""

    number: int
    holder: str
    """`pid 17 on host`."""
    boot: str
    """`boot_id` of its machine; processes of that machine rely on the lock instead."""
    renewals: int = 0
    is_ended: bool = False
    """Whether its holder has left the directory."""


_FORMAT = TypeAdapter(Lease)


class LeaseWatch:
    """Tells when a lease has been watched for its whole validity without a renewal."""

    def __init__(self, expiry_s: float, clock: Callable[[], float] = time_since_boot) -> None:
        self._expiry_s, self._clock = expiry_s, clock
        self._seen: Lease | None = None
        self._since = self._looked = clock()

    def is_expired(self, lease: Lease) -> bool:
        """Whether the lease has expired; call it repeatedly with the present contents of the file."""
        now = self._clock()
        if lease != self._seen or now - self._looked > _LONGEST_GAP_S:
            self._seen, self._since = lease, now
        self._looked = now
        return now - self._since > self._expiry_s


@contextmanager
def leased(
    directory: Path,
    waiting: Callable[[str], None],
    lost: Callable[[str], None],
    *,
    boot: str | None = None,
    renewal: Renewal = _RENEWAL,
) -> Iterator[None]:
    """Keep all other machines out of `directory` in this context; the lock keeps other processes of this machine out.

    `waiting` is called once with the holder that is waited for. `lost` is called from a thread when the lease is lost,
    with what became of it; it should end the process.
    """
    folder = directory / LEASE_FOLDER
    folder.mkdir(exist_ok=True)
    own = _take(folder, boot or boot_id() or uuid.uuid4().hex, waiting, LeaseWatch(renewal.expiry_s))
    ended = threading.Event()
    renewing = threading.Thread(target=_renew, args=(folder, own, lost, renewal, ended), name="lease", daemon=True)
    renewing.start()
    try:
        yield
    finally:
        ended.set()
        renewing.join()
        with contextlib.suppress(OSError):  # otherwise the lease expires
            _write(folder, replace(own, is_ended=True))


def foreign_holder(directory: Path) -> str | None:
    """The holder of another machine's lease ("pid 17 on host"), which may be gone; None without such a lease."""
    lease = _newest(directory / LEASE_FOLDER)
    return None if lease is None or lease.is_ended or lease.boot == boot_id() else lease.holder


def _take(folder: Path, boot: str, waiting: Callable[[str], None], watch: LeaseWatch) -> Lease:
    """Wait until the newest lease is no longer valid, and take the next one."""
    announced = False
    while True:
        newest = _newest(folder)
        if newest is None or newest.is_ended or newest.boot == boot or watch.is_expired(newest):
            own = Lease(newest.number + 1 if newest else 1, f"pid {os.getpid()} on {socket.gethostname()}", boot)
            if _create(folder, own):
                return own
            continue  # another process was faster
        if not announced:
            waiting(f"{newest.holder}, or until its lease expires")
            announced = True
        time.sleep(_POLL_S)


def _create(folder: Path, own: Lease) -> bool:
    """Create the file of `own`; returns whether its number was still free."""
    try:
        descriptor = os.open(_path(folder, own.number), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    except FileExistsError:
        return False
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(_FORMAT.dump_json(own))
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        _path(folder, own.number).unlink(missing_ok=True)
        raise
    for number in _numbers(folder):
        if number < own.number:
            _path(folder, number).unlink(missing_ok=True)
    return True


def _renew(folder: Path, own: Lease, lost: Callable[[str], None], renewal: Renewal, ended: threading.Event) -> None:
    renewed = time_since_boot()
    while not ended.wait(min(_LOOK_S, renewal.every_s)):
        now = time_since_boot()
        if now - renewed > renewal.expiry_s:
            lost(_fate(folder, own))
            return
        if now - renewed < renewal.every_s:
            continue
        with contextlib.suppress(OSError):  # a full disk or a server that is away: the next renewal may succeed
            if (newest := _newest(folder)) is None or newest.number != own.number:
                lost(_fate(folder, own))
                return
            own = replace(own, renewals=own.renewals + 1)
            _write(folder, own)
            renewed = now  # the time before the write: a hanging write is not a renewal


def _fate(folder: Path, own: Lease) -> str:
    with contextlib.suppress(OSError):
        newest = _newest(folder)
        if newest is not None and newest.number != own.number:
            return f"the stage went to {newest.holder}"
    return "its lease has expired"


def _newest(folder: Path) -> Lease | None:
    """The lease with the highest number; None before the first."""
    while numbers := _numbers(folder):
        number = max(numbers)
        try:
            return _FORMAT.validate_json(_path(folder, number).read_bytes())  # opened, which makes NFS ask its server
        except ValidationError:
            # It is being written, or a failing disk has cut it short.
            return Lease(number, "another machine", "")
        except OSError as error:
            if error.errno not in _DELETED:
                raise
            time.sleep(_POLL_S)
    return None


def _numbers(folder: Path) -> list[int]:
    return [int(path.stem) for path in folder.glob("[0-9]*.json")]


def _path(folder: Path, number: int) -> Path:
    return folder / f"{number:06d}.json"


def _write(folder: Path, lease: Lease) -> None:
    write_atomic(_path(folder, lease.number), _FORMAT.dump_json(lease).decode())

"""The lease of a stage's directory, which keeps other machines out where locks end at each machine.

The process that works in the directory renews a file there. Another machine takes the lease once it has seen no renewal
for some time; it compares the file with itself, not with a clock. A holder that finds its lease taken, after it was
suspended or cut off from the disk for so long, has to end at once.
"""

import contextlib
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

LEASE_FILE = ".lease"
_POLL_S = 0.2


@dataclass(frozen=True, slots=True)
class Renewal:
    """How often a lease is renewed, and how long it is honoured without."""

    every_s: float = 10.0
    expiry_s: float = 90.0
    """Longer than NFS keeps attributes without asking its server (60 s)."""


_RENEWAL = Renewal()


@dataclass(frozen=True, slots=True)
class Lease:
    """The contents of the file."""

    holder: str
    """`pid 17 on host`."""
    boot: str
    """`boot_id` of its machine, on which the lock is decisive."""
    token: str
    """Different for each holder."""
    renewals: int = 0


_FORMAT = TypeAdapter(Lease)


class LeaseWatch:
    """Whether a lease has been seen unchanged for longer than it is honoured."""

    def __init__(self, expiry_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._expiry_s, self._clock = expiry_s, clock
        self._seen: Lease | None = None
        self._since = 0.0

    def is_expired(self, lease: Lease) -> bool:
        """To be asked again and again with the present contents."""
        if lease != self._seen:
            self._seen, self._since = lease, self._clock()
        return self._clock() - self._since > self._expiry_s


@contextmanager
def leased(
    directory: Path,
    waiting: Callable[[str], None],
    lost: Callable[[str], None],
    *,
    boot: str | None = None,
    renewal: Renewal = _RENEWAL,
) -> Iterator[None]:
    """Inside, no other machine works in `directory`; the lock keeps other processes of this one out.

    `waiting` is called once with the holder that is waited for. `lost` is called from a thread with the new holder when
    the lease was taken meanwhile; it should end the process.
    """
    path = directory / LEASE_FILE
    own = Lease(f"pid {os.getpid()} on {socket.gethostname()}", boot or boot_id(), uuid.uuid4().hex)
    _wait(path, own.boot, waiting, LeaseWatch(renewal.expiry_s))
    write_atomic(path, _as_text(own))
    ended = threading.Event()
    renewing = threading.Thread(target=_renew, args=(path, own, lost, renewal, ended), name="lease", daemon=True)
    renewing.start()
    try:
        yield
    finally:
        ended.set()
        renewing.join()
        if _is_of(own, _read(path)):
            path.unlink(missing_ok=True)


def _wait(path: Path, boot: str, waiting: Callable[[str], None], watch: LeaseWatch) -> None:
    announced = False
    while (lease := _read(path)) is not None and lease.boot != boot and not watch.is_expired(lease):
        if not announced:
            waiting(f"{lease.holder}, or until its lease expires")
            announced = True
        time.sleep(_POLL_S)


def _renew(path: Path, own: Lease, lost: Callable[[str], None], renewal: Renewal, ended: threading.Event) -> None:
    while not ended.wait(renewal.every_s):
        with contextlib.suppress(OSError):  # a full disk or a server that is away: the next renewal may succeed
            found = _read(path)
            if not _is_of(own, found):
                lost(found.holder if found else "another process, which has ended")
                return
            own = replace(own, renewals=own.renewals + 1)
            write_atomic(path, _as_text(own))


def _is_of(own: Lease, found: Lease | None) -> bool:
    return found is not None and found.token == own.token


def _read(path: Path) -> Lease | None:
    """None where there is none, or one that a failing disk has cut short."""
    try:
        return _FORMAT.validate_json(path.read_bytes())  # opened each time, which makes NFS ask its server
    except (FileNotFoundError, ValidationError):
        return None


def _as_text(lease: Lease) -> str:
    return _FORMAT.dump_json(lease).decode()

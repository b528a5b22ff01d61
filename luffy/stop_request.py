"""Stop requests from schedulers: SIGTERM, and SIGKILL after a grace period.

    with deferring_stop_requests(grace_s=20.0, at_deadline=give_up):
        for step in ...:
            ...
            if stop_is_requested():
                save(step)
                raise StoppedOnRequest(f"step {step} is saved")

A signal concerns the whole process, and so does the state of this module. Outside such a block SIGTERM interrupts the
main thread at once (KeyboardInterrupt); so does a second one inside it.
"""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from types import FrameType

from luffy.errors import EXIT_TEMPORARY, LuffyError

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
"""A scheduler sends SIGTERM to every process of a job, and the stage's supervisor then sends SIGUSR1: one of each is
still a single request."""


class StoppedOnRequest(LuffyError):
    """The work ended on request; everything that it had finished is saved."""

    exit_code = EXIT_TEMPORARY


_deferred = threading.Event()
"""Set within a block that defers requests."""
_received: set[int] = set()
_first: SimpleQueue[None] = SimpleQueue()
"""Has an item after the first request. Unlike an event's, its lock does not stop a handler that interrupts another."""


def receive_stop_requests() -> None:
    """Take SIGTERM and SIGUSR1 as requests to end; for the main thread."""
    for number in STOP_SIGNALS:
        signal.signal(number, _receive)


def stop_is_requested() -> bool:
    """Whether a request has come that waits for the work under way."""
    return bool(_received)


def check_stop_request(what_is_kept: str) -> None:
    """Raise StoppedOnRequest if there is a request; `what_is_kept` completes "was asked to end: "."""
    if stop_is_requested():
        raise StoppedOnRequest(what_is_kept)


@contextmanager
def deferring_stop_requests(grace_s: float, at_deadline: Callable[[], None]) -> Iterator[None]:
    """Within the block, the first request only makes `stop_is_requested` true.

    `at_deadline` is called from a thread `grace_s` after it, also when the block has ended by then: what follows a
    stopped block has to fit into the grace as well.
    """

    def watch() -> None:
        _first.put(_first.get())  # back, for the threads of other blocks
        if not never.wait(grace_s):
            at_deadline()

    never = threading.Event()
    _deferred.set()
    threading.Thread(target=watch, name="stop-deadline", daemon=True).start()
    try:
        yield
    finally:
        _deferred.clear()
        if not _received:
            never.set()  # the process may go on to other work


def _receive(number: int, frame: FrameType | None) -> None:
    # Also just after the block: the supervisor's signal may follow that of the scheduler into the clean-up.
    if (_deferred.is_set() or _received) and number not in _received:
        _received.add(number)
        _first.put(None)
        return
    for each in STOP_SIGNALS:
        signal.signal(each, signal.SIG_IGN)  # a further signal must not interrupt the clean-up
    raise KeyboardInterrupt

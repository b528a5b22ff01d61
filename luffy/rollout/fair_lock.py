"""A fair lock, for the threads that step an engine and the one that updates its weights."""

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from luffy.errors import LuffyError


class FairLock:
    """A first-in, first-out lock: an update waits for at most one step of each other thread.

    A wait of more than `timeout_s` raises LuffyError.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._changed = threading.Condition()
        # The first ticket holds the lock.
        self._queue: deque[object] = deque()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the lock for the length of the block."""
        self.acquire()
        try:
            yield
        finally:
            self.release()

    def acquire(self) -> None:
        """Wait for the lock."""
        ticket, acquired = object(), False
        with self._changed:
            self._queue.append(ticket)
            try:
                acquired = self._changed.wait_for(lambda: self._queue[0] is ticket, self._timeout_s)
            finally:
                if not acquired:
                    self._queue.remove(ticket)
                    self._changed.notify_all()
        if not acquired:
            raise LuffyError(f"the engine was busy for {self._timeout_s:g} s: a step or an update of its weights hangs")

    def release(self) -> None:
        """Pass the lock to the thread that has waited longest."""
        with self._changed:
            self._queue.popleft()
            self._changed.notify_all()

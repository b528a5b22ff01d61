"""A fair lock: whoever steps an engine and whoever updates its weights take turns."""

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from luffy.errors import LuffyError


class Turns:
    """A lock that is had in the order it was asked for: an update waits for at most one step of each other thread.

    It belongs to no thread, so that a transfer may begin in one call and end in another. No wait is longer than
    `timeout_s`: LuffyError.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._changed = threading.Condition()
        # The first of them has the turn.
        self._queue: deque[object] = deque()

    @contextmanager
    def turn(self) -> Iterator[None]:
        """The turn, for as long as the block lasts."""
        self.take()
        try:
            yield
        finally:
            self.give()

    def take(self) -> None:
        """Wait for the turn."""
        ticket, had = object(), False
        with self._changed:
            self._queue.append(ticket)
            try:
                had = self._changed.wait_for(lambda: self._queue[0] is ticket, self._timeout_s)
            finally:
                if not had:
                    self._queue.remove(ticket)
                    self._changed.notify_all()
        if not had:
            raise LuffyError(
                f"the engine was busy for {self._timeout_s:g} s: a step hangs, or a weight update was begun and "
                "never finished"
            )

    def give(self) -> None:
        """Pass the turn on to whoever has waited longest."""
        with self._changed:
            self._queue.popleft()
            self._changed.notify_all()

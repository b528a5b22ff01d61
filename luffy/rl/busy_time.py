"""Time in which at least one thread is at work."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager


class BusyTime:
    """Measures the time in which at least one thread is at work, since it was last read."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._active = 0
        self._busy = 0.0
        self._changed = self._last_read = time.perf_counter()

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Count the time in this context as busy."""
        self._change(+1)
        try:
            yield
        finally:
            self._change(-1)

    def since_last(self) -> tuple[float, float]:
        """Seconds since the last call, and how many of them were busy."""
        self._change(0)
        with self._lock:
            elapsed, busy = self._changed - self._last_read, self._busy
            self._last_read, self._busy = self._changed, 0.0
        return elapsed, busy

    def _change(self, by: int) -> None:
        with self._lock:
            now = time.perf_counter()
            self._busy += (now - self._changed) if self._active else 0.0
            self._changed = now
            self._active += by

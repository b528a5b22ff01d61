"""The workers of a pool, idle and busy ones."""

import threading
from collections.abc import Sequence

from luffy.errors import LuffyError
from luffy.grading.fork_server import ForkServer
from luffy.grading.process import WorkerProcess


class Workers:
    """Hands out workers; `most_idle` of those that come back are kept. May be shared by threads."""

    def __init__(self, most_idle: int, functions: Sequence[str] = ()) -> None:
        self._most_idle = most_idle
        self._server = ForkServer(functions)
        self._lock = threading.Lock()
        self._idle: list[WorkerProcess] = []
        self._live: set[WorkerProcess] = set()
        self._closing = False

    def take(self, *, fresh: bool = False) -> WorkerProcess:
        """Return a worker that is ready, forked where none is idle, or where it has to be `fresh`.

        LuffyError when it cannot start, LostError when the grading server is gone.
        """
        with self._lock:
            if self._idle and not fresh:
                return self._idle.pop()
        worker = WorkerProcess(self._server)
        with self._lock:
            self._live.add(worker)
            closing = self._closing
        if closing:
            worker.interrupt()
        try:
            worker.wait_until_ready()
        except LuffyError:
            self.discard(worker)
            raise
        return worker

    def give_back(self, worker: WorkerProcess) -> None:
        """Take back a worker that has done its work, or has died of it."""
        with self._lock:
            is_kept = not worker.is_gone and not self._closing and len(self._idle) < self._most_idle
            if is_kept:
                worker.is_fresh = False
                self._idle.append(worker)
        if not is_kept:
            self.discard(worker)

    def discard(self, worker: WorkerProcess) -> None:
        """Kill a worker, whatever it is doing."""
        worker.kill()
        with self._lock:
            self._live.discard(worker)

    def pids(self) -> list[int]:
        """Return the process ids of all workers, paused ones included."""
        with self._lock:
            return [worker.pid for worker in self._live]

    def interrupt(self) -> None:
        """Kill all workers, and the server if it is still loading: whoever waits for one sees it die."""
        with self._lock:
            self._closing = True
            live = list(self._live)
        self._server.interrupt_loading()
        for worker in live:
            worker.interrupt()

    def close(self) -> None:
        """End all processes. Nobody uses them any more."""
        with self._lock:
            live = list(self._live)
        for worker in live:
            self.discard(worker)
        self._server.close()

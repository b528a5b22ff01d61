"""Queue of verifications for the workers, in which short ones overtake long ones."""

import heapq
import itertools
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass, field

from luffy.grading.process import WorkerProcess
from luffy.grading.request import Grade, Verification

OVERTAKING_S = 60.0
"""A verification that runs long is overtaken by what is submitted within this time of it, and by nothing later."""


@dataclass(slots=True, eq=False)
class Job:
    """A verification and its progress."""

    work: Verification
    verdict: "Future[Grade]"
    submitted: float = field(default_factory=time.monotonic)
    worker: WorkerProcess | None = None
    """Holds the computation of a job that has been put aside."""
    seconds: float = 0.0
    """Time that it has run for; counted against the time limit, and without the time for which it was put aside."""
    deaths: int = 0
    """Number of workers that were forked for it, and died while running it."""
    losses: int = 0
    """Number of workers whose death says nothing of it: one had been idle before, or died with the grading server."""


class JobQueue:
    """Jobs by the time of their submission, those put aside as though submitted `OVERTAKING_S` later."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: list[tuple[float, int, Job]] = []
        self._numbers = itertools.count()
        self._num_aside = 0
        self._closed = False

    def submit(self, jobs: list[Job]) -> bool:
        """Queue new jobs; returns False, and takes none, after `close`."""
        with self._changed:
            if self._closed:
                return False
            for job in jobs:
                self._push(job.submitted, job)
            return True

    def take(self) -> Job | None:
        """Wait for the next job and return it; None after `close`."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closed)
            if self._closed:
                return None
            _, _, job = heapq.heappop(self._waiting)
            self._num_aside -= job.worker is not None
            return job

    def put_aside(self, job: Job, worker: WorkerProcess, most: int) -> bool:
        """Pause `job` and queue it again if shorter work is waiting; return whether it was paused.

        At most `most` jobs are paused at a time: each holds the memory of its `worker`.
        """
        due = job.submitted + OVERTAKING_S
        with self._changed:
            overtaken = bool(self._waiting) and self._waiting[0][0] < due
            if self._closed or not overtaken or self._num_aside >= most:
                return False
            worker.pause()
            job.worker = worker
            self._num_aside += 1
            self._push(due, job)
            return True

    def close(self) -> list[Job]:
        """Wake all threads that wait in `take`; return the jobs that were still queued."""
        with self._changed:
            self._closed = True
            left, self._waiting = [job for _, _, job in self._waiting], []
            self._changed.notify_all()
        return left

    def _push(self, due: float, job: Job) -> None:
        heapq.heappush(self._waiting, (due, next(self._numbers), job))
        self._changed.notify()

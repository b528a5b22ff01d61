"""Grades responses; verification that needs mathematics runs in worker processes that can be killed.

    with GraderPool(num_workers=2, timeout_s=5.0) as pool:
        grades = pool.grade([GradeRequest(response=r"... \boxed{52}", ground_truth="52")])

A verification that hangs costs its time-out and its worker, never the caller; a worker that dies is `crashed`.
"""

import queue
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from types import TracebackType

from luffy.errors import LuffyError
from luffy.grading.extract import extract_answer
from luffy.grading.process import WorkerProcess
from luffy.grading.shortcuts import settle
from luffy.types import Outcome

MEMO_SIZE = 65_536
"""Verdicts remembered, the least recently used forgotten first."""

_CLOSED_MEANWHILE = "the grader pool was closed while it was grading"
_Pair = tuple[str, str]


@dataclass(frozen=True, slots=True)
class GradeRequest:
    """A response and the reference answer it is held against."""

    response: str
    ground_truth: str


@dataclass(frozen=True, slots=True)
class Grade:
    """What grading found."""

    outcome: Outcome
    answer: str | None
    """The final answer as the response writes it; None where there is none."""

    @property
    def reward(self) -> float:
        return 1.0 if self.outcome is Outcome.CORRECT else 0.0


@dataclass(frozen=True, slots=True)
class _Job:
    pair: _Pair
    verdict: "Future[Outcome]"


class GraderPool:
    """Grades batches of responses; may be shared by threads.

    `num_workers` verifications run at once; `timeout_s` bounds each one, counted from the moment a worker takes it
    up. No worker is started before the first pair that needs one.
    """

    def __init__(self, num_workers: int, timeout_s: float) -> None:
        self._num_workers = num_workers
        self._timeout_s = timeout_s
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._slots: list[_Slot] = []
        self._memo: OrderedDict[_Pair, Outcome] = OrderedDict()
        self._lock = threading.Lock()
        self._closed = False

    def grade(self, requests: Sequence[GradeRequest]) -> list[Grade]:
        """Return one grade a request, in order; LuffyError when the pool is closed or no worker can start."""
        if self._closed:
            raise LuffyError("the grader pool is closed")
        answers = [extract_answer(request.response) for request in requests]
        pairs = [(answer, request.ground_truth) for answer, request in zip(answers, requests, strict=True)]
        outcomes = self._verdicts({(answer, truth) for answer, truth in pairs if answer is not None})
        return [
            Grade(outcomes[answer, truth] if answer is not None else Outcome.NO_ANSWER, answer)
            for answer, truth in pairs
        ]

    def close(self) -> None:
        """End all workers; a `grade` in flight on another thread raises LuffyError. May be called again."""
        with self._lock:
            already, self._closed = self._closed, True
            slots = list(self._slots)
        if already:
            return
        for slot in slots:
            slot.stop()
        for _ in slots:
            self._jobs.put(None)
        for slot in slots:
            slot.thread.join()
        _refuse_waiting(self._jobs)

    def __enter__(self) -> "GraderPool":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def worker_pids(self) -> list[int]:
        """Return the process ids of the workers that are alive now."""
        with self._lock:
            workers = [slot.worker for slot in self._slots]
        return [worker.pid for worker in workers if worker is not None]

    def _verdicts(self, pairs: set[_Pair]) -> dict[_Pair, Outcome]:
        outcomes: dict[_Pair, Outcome] = {}
        waiting: dict[_Pair, Future[Outcome]] = {}
        for pair in sorted(pairs):
            known = settle(*pair) or self._remembered(pair)
            if known is None:
                waiting[pair] = Future()
            else:
                outcomes[pair] = known
        self._submit([_Job(pair, verdict) for pair, verdict in waiting.items()])
        for pair, verdict in waiting.items():
            outcomes[pair] = verdict.result()
            self._remember(pair, outcomes[pair])
        return outcomes

    def _submit(self, jobs: Sequence[_Job]) -> None:
        with self._lock:
            if self._closed:
                raise LuffyError("the grader pool is closed")
            while len(self._slots) < min(self._num_workers, len(jobs)):
                self._slots.append(_Slot(self._jobs, self._timeout_s))
            for job in jobs:
                self._jobs.put(job)

    def _remembered(self, pair: _Pair) -> Outcome | None:
        with self._lock:
            outcome = self._memo.get(pair)
            if outcome is not None:
                self._memo.move_to_end(pair)
            return outcome

    def _remember(self, pair: _Pair, outcome: Outcome) -> None:
        # A crash may have come from outside (out of memory, a signal): the next time the pair gets a fresh chance.
        if outcome is Outcome.CRASHED:
            return
        with self._lock:
            self._memo[pair] = outcome
            if len(self._memo) > MEMO_SIZE:
                self._memo.popitem(last=False)


class _Slot:
    """A thread that owns one worker at a time: takes a job, asks the worker, replaces the worker when it is gone.

    The worker's parent-death signal is tied to the thread that started it, hence a thread that lasts as long as the
    pool, whichever thread calls `grade`.
    """

    def __init__(self, jobs: "queue.SimpleQueue[_Job | None]", timeout_s: float) -> None:
        self.worker: WorkerProcess | None = None
        self._jobs = jobs
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._stopped = False
        self.thread = threading.Thread(target=self._serve, name="grader", daemon=True)
        self.thread.start()

    def stop(self) -> None:
        """Kill the worker, whatever it is doing, and take no further job."""
        with self._lock:
            self._stopped = True
            if self.worker is not None:
                self.worker.interrupt()

    def _serve(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job.verdict.set_result(self._verify(*job.pair))
            except BaseException as error:  # noqa: BLE001 - whatever it is, the caller waits for it on the future
                job.verdict.set_exception(error)
        self._discard_worker()

    def _verify(self, answer: str, ground_truth: str) -> Outcome:
        worker = self.worker or self._start_worker()
        outcome = worker.verify(answer, ground_truth, self._timeout_s)
        if outcome in (Outcome.TIMED_OUT, Outcome.CRASHED):
            self._discard_worker()
        self._refuse_if_stopped()
        return outcome

    def _start_worker(self) -> WorkerProcess:
        with self._lock:
            self._refuse_if_stopped()
            self.worker = worker = WorkerProcess()
        try:
            worker.wait_until_ready()
        except LuffyError:
            self._discard_worker()
            self._refuse_if_stopped()
            raise
        return worker

    def _refuse_if_stopped(self) -> None:
        if self._stopped:
            raise LuffyError(_CLOSED_MEANWHILE)

    def _discard_worker(self) -> None:
        with self._lock:
            worker, self.worker = self.worker, None
        if worker is not None:
            worker.kill()


def _refuse_waiting(jobs: "queue.SimpleQueue[_Job | None]") -> None:
    """Wake whoever still waits for a job that no worker will take up."""
    while True:
        try:
            job = jobs.get_nowait()
        except queue.Empty:
            return
        if job is not None:
            job.verdict.set_exception(LuffyError(_CLOSED_MEANWHILE))

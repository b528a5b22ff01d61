"""Grades responses; what may hang or crash runs in worker processes that can be killed.

    with GraderPool(num_workers=2, timeout_s=5.0) as pool:
        grades = pool.grade([GradeRequest(response=r"... \boxed{52}", ground_truth="52")])

A verification that hangs costs its time-out and its worker, never the caller. One whose worker dies gets a second
worker, since something else may have killed the first; it is `crashed` when that dies too.
A judge is asked from threads of the parent, which do no more than wait for a socket.
"""

import asyncio
import logging
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType

from luffy.config.grading import GraderKind, GradingConfig
from luffy.errors import ConfigError, DataError, LuffyError
from luffy.grading.judge import ask_judge
from luffy.grading.kinds import conclude, functions_of, steps
from luffy.grading.process import WorkerProcess
from luffy.grading.protocol import Reply
from luffy.grading.request import Consultation, Grade, GradeRequest, Work
from luffy.types import Outcome

logger = logging.getLogger(__name__)
MEMO_SIZE = 65_536
"""Verdicts remembered, the least recently used forgotten first."""

JUDGE_CACHE = "judge"
"""Folder of a stage that keeps what a judge said."""

_CLOSED = "the grader pool is closed"
_CLOSED_MEANWHILE = "the grader pool was closed while it was grading"

_Open = Work | Consultation


@dataclass(frozen=True, slots=True)
class _Job:
    work: Work
    verdict: "Future[Grade]"


class GraderPool:
    """Grades batches of responses; may be shared by threads.

    `num_workers` verifications run at once; `timeout_s` bounds each one, counted from the moment a worker takes it
    up. No worker is started before the first piece of work that needs one. `config` says which kind of grader grades
    what (its own time limit aside); without it that is `math`. `judge_cache`: the folder of a judge's verdicts; None:
    they are not kept. `others`: kinds that requests may bring along, so that the modules of their functions are loaded
    with the worker. `memo_size=0` remembers nothing.
    """

    def __init__(
        self,
        num_workers: int,
        timeout_s: float,
        config: GradingConfig | None = None,
        judge_cache: Path | None = None,
        others: Sequence[GraderKind] = (),
        memo_size: int = MEMO_SIZE,
    ) -> None:
        self._num_workers = num_workers
        self._timeout_s = timeout_s
        self._config = config or GradingConfig()
        self._judge_cache = judge_cache
        self._memo_size = memo_size
        self._functions = tuple(dict.fromkeys(_functions((self._config.kind, *self._config.named.values(), *others))))
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._slots: list[_Slot] = []
        self._judges: ThreadPoolExecutor | None = None
        self._memo: OrderedDict[Hashable, Grade] = OrderedDict()
        self._lock = threading.Lock()
        self._closed = False

    @classmethod
    def configured(
        cls, num_workers: int, config: GradingConfig, judge_cache: Path, others: Sequence[GraderKind] = ()
    ) -> "GraderPool":
        """The pool that an experiment's `grading` describes."""
        return cls(num_workers, config.timeout_s, config, judge_cache, others)

    def grade(self, requests: Sequence[GradeRequest]) -> list[Grade]:
        """Return one grade a request, in order.

        LuffyError when the pool is closed or no worker can start; DataError for a grader that a problem names and
        nobody has; ConfigError for a custom function that cannot be imported and a judge that refuses.
        """
        if self._closed:
            raise LuffyError(_CLOSED)
        kinds = [self.kind_of(request) for request in requests]
        wanted = [steps(kind, request) for kind, request in zip(kinds, requests, strict=True)]
        found = self._found({step for needed in wanted for step in needed if not isinstance(step, Grade)})
        return [
            conclude(kind, iter([step if isinstance(step, Grade) else found[step] for step in needed]))
            for kind, needed in zip(kinds, wanted, strict=True)
        ]

    def grade_one(self, response: str, gold: str, *, kind: GraderKind | None = None) -> Grade:
        """Return the grade of one response; `kind` None: the default."""
        return self.grade([GradeRequest(response, gold, kind=kind)])[0]

    async def grade_async(self, requests: Sequence[GradeRequest]) -> list[Grade]:
        """As `grade`, for an event loop: other coroutines go on meanwhile."""
        return await asyncio.to_thread(self.grade, requests)

    def close(self) -> None:
        """End all workers; a `grade` in flight on another thread raises LuffyError. May be called again."""
        with self._lock:
            already, self._closed = self._closed, True
            slots, judges = list(self._slots), self._judges
        if already:
            return
        if judges is not None:
            judges.shutdown(wait=False, cancel_futures=True)
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

    def kind_of(self, request: GradeRequest) -> GraderKind:
        """Return what grades `request`; DataError for a grader that its problem names and nobody has."""
        if request.kind is not None:
            return request.kind
        name = request.problem.grader
        try:
            return self._config.grader(name)
        except KeyError:
            raise DataError(
                f"reward_model.style: no grader is called {name!r}; there are {', '.join(self._config.names)} "
                "(add others to grading.named)"
            ) from None

    def _found(self, wanted: set[_Open]) -> dict[_Open, Grade]:
        found: dict[_Open, Grade] = {}
        waiting: dict[_Open, Future[Grade]] = {}
        # Sorted: which worker gets what must not hang on the hash seed.
        for step in sorted(wanted, key=_order):
            known = self._remembered(step)
            if known is None:
                waiting[step] = Future() if isinstance(step, Work) else self._asked(step)
            else:
                found[step] = known
        self._submit([_Job(step, verdict) for step, verdict in waiting.items() if isinstance(step, Work)])
        for step, verdict in waiting.items():
            try:
                found[step] = verdict.result()
            except CancelledError:
                raise LuffyError(_CLOSED_MEANWHILE) from None
            self._remember(step, found[step])
        return found

    def _asked(self, consultation: Consultation) -> "Future[Grade]":
        judge, question = consultation
        with self._lock:
            if self._closed:
                raise LuffyError(_CLOSED)
            if self._judges is None:
                self._judges = ThreadPoolExecutor(judge.parallel, thread_name_prefix="judge")
            return self._judges.submit(ask_judge, judge, question, self._judge_cache)

    def _submit(self, jobs: Sequence[_Job]) -> None:
        with self._lock:
            if self._closed:
                raise LuffyError(_CLOSED)
            while len(self._slots) < min(self._num_workers, len(jobs)):
                self._slots.append(_Slot(self._jobs, self._timeout_s, self._functions))
            for job in jobs:
                self._jobs.put(job)

    def _remembered(self, step: _Open) -> Grade | None:
        with self._lock:
            grade = self._memo.get(step)
            if grade is not None:
                self._memo.move_to_end(step)
            return grade

    def _remember(self, step: _Open, grade: Grade) -> None:
        # A crash may have come from outside (out of memory, signals): the next time it gets a fresh chance. A custom
        # function may be of any mind the next time, and a judge has a memory of its own.
        if grade.outcome is Outcome.CRASHED or not isinstance(step, Work) or step.check == "custom":
            return
        with self._lock:
            self._memo[step] = replace(grade, seconds=0.0)
            if len(self._memo) > self._memo_size:
                self._memo.popitem(last=False)


def _functions(kinds: Sequence[GraderKind]) -> list[str]:
    return [path for kind in kinds for path in functions_of(kind)]


def _order(step: _Open) -> tuple[str, ...]:
    return step if isinstance(step, Work) else ("judge", *step.question)


class _Slot:
    """A thread that owns one worker at a time: takes a job, asks the worker, replaces the worker when it is gone.

    The worker's parent-death signal is tied to the thread that started it, hence a thread that lasts as long as the
    pool, whichever thread calls `grade`.
    """

    def __init__(self, jobs: "queue.SimpleQueue[_Job | None]", timeout_s: float, functions: Sequence[str]) -> None:
        self.worker: WorkerProcess | None = None
        self._jobs = jobs
        self._timeout_s = timeout_s
        self._functions = functions
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
                job.verdict.set_result(self._decide(job.work))
            except BaseException as error:  # noqa: BLE001 - whatever it is, the caller waits for it on the future
                job.verdict.set_exception(error)
        self._discard_worker()

    def _decide(self, work: Work) -> Grade:
        started = time.monotonic()
        reply, has_died = self._ask(work)
        if has_died:
            reply, _ = self._ask(work)
        if reply.misconfigured:
            raise ConfigError(f"grading: {reply.reason}")
        if reply.outcome is Outcome.CRASHED:
            logger.warning("grading by %s crashed: %s", work.check, reply.reason)
        answer = None if work.check == "custom" else work.answer
        return Grade(reply.outcome, answer, reply.reason, time.monotonic() - started, reply.reward).saying(work.note)

    def _ask(self, work: Work) -> tuple[Reply, bool]:
        """The worker's reply, and whether the worker has died of itself in place of one."""
        worker = self.worker or self._start_worker()
        reply = worker.check(work, self._timeout_s)
        if worker.is_gone:
            self._discard_worker()
        self._refuse_if_stopped()
        return reply, worker.is_gone and reply.outcome is Outcome.CRASHED

    def _start_worker(self) -> WorkerProcess:
        with self._lock:
            self._refuse_if_stopped()
            self.worker = worker = WorkerProcess(self._functions)
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

"""Grades responses; checks that may hang or crash run in worker processes that can be killed.

    with GraderPool(num_workers=2, timeout_s=5.0) as pool:
        grades = pool.grade([GradeRequest(response=r"... \boxed{52}", ground_truth="52")])

A verification that hangs costs its time limit and its worker. One whose worker dies gets another one, forked for it,
since something else may have killed the first; it is `crashed` when two such workers die while the grading server lives
on. Judges are called from one thread of this process, which only waits for sockets. Reward models score in the caller's
thread.
"""

import hashlib
import json
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING

from luffy.config.execution import ExecutionConfig
from luffy.config.grading import CodeGrader, GraderKind, GradingConfig, leaves, reward_models
from luffy.errors import ConfigError, DataError, LostError, LuffyError
from luffy.grading.judge import Judges
from luffy.grading.kinds import conclude, functions_of, steps
from luffy.grading.programs import CODE, Programs
from luffy.grading.request import LOAD, Grade, GradeRequest, JudgeRequest, RewardRequest, Verification
from luffy.grading.workers import SERVER_DIED, WorkerProcess, Workers
from luffy.types import Outcome

if TYPE_CHECKING:
    from luffy.grading.reward_model import RewardModels

logger = logging.getLogger(__name__)
JUDGE_CACHE = "judge"
"""Folder of a stage that keeps the judge's verdicts."""
TIMEOUTS_FILE = "timed_out.txt"
"""Names the pairs of texts whose verification timed out in a stage: they stay timed out when it is resumed."""
_MOST_LOSSES = 2
"""Workers that a verification may lose to something else: one that had been idle, or those of a server that died."""
MEMO_SIZE = 65_536
"""Verdicts and time-outs remembered, the least recently used forgotten first."""
_KEY_CHARS = 32
_CLOSED = "the grader pool is closed"
_CLOSED_MEANWHILE = "the grader pool was closed while it was grading"
_Open = Verification | JudgeRequest | RewardRequest


class VerdictMemo:
    """Remembers verdicts by grader, texts and time limit; may be shared by threads. `size=0` remembers nothing.

    Whether a verification ends before its time limit depends on the machine, so a repetition could come out
    differently. Therefore a pair that is being graded is not graded a second time, and one that timed out stays timed
    out. Time-outs are rare and expensive: they are forgotten last, and a stage keeps them in a file, so that it grades
    new rollouts after it is resumed as it would have without the interruption.
    """

    def __init__(self, timeout_s: float, size: int = MEMO_SIZE, timeouts_file: Path | None = None) -> None:
        self._timeout_s = timeout_s
        self._size = size
        self._file = timeouts_file
        self._lock = threading.Lock()
        self._verdicts: OrderedDict[str, Future[Grade]] = OrderedDict()
        self._timeouts: OrderedDict[str, Future[Grade]] = OrderedDict()
        if timeouts_file is not None and timeouts_file.exists():
            for key in timeouts_file.read_text(encoding="ascii", errors="replace").split("\n"):
                if len(key) == _KEY_CHARS:
                    self._keep(self._timeouts, key, _known(timed_out(timeout_s)))

    def claim(
        self, work: Verification, start: Callable[[Verification], "Future[Grade]"]
    ) -> tuple["Future[Grade]", bool]:
        """Return a future of the verdict on `work`, and whether it was started for this caller."""
        key = self._key(work)
        with self._lock:
            for known in (self._verdicts, self._timeouts):
                if key in known:
                    known.move_to_end(key)
                    return known[key], False
            verdict = start(work)
            if self._size:
                self._keep(self._verdicts, key, verdict)
            return verdict, True

    def settle(self, work: Verification, found: Grade | None) -> None:
        """Note what was found, None where nothing was; for a time-out before anybody gets it."""
        outcome = None if found is None else found.outcome
        is_late = outcome is Outcome.TIMED_OUT and work.check != CODE  # programs have limits of CPU time, and a reward
        # A crash may have come from outside (out of memory, a signal): the next time it gets a fresh chance.
        if outcome in (None, Outcome.CRASHED) or is_late:
            key = self._key(work)
            with self._lock:
                self._verdicts.pop(key, None)
                if is_late and found is not None and self._size:
                    self._keep(self._timeouts, key, _known(found))
                    if self._file is not None:
                        self._file.parent.mkdir(parents=True, exist_ok=True)
                        with self._file.open("a", encoding="ascii") as file:
                            # One write, as processes that prepare data share the file; a line that a kill cut short
                            # ends first.
                            file.write(f"\n{key}\n")

    def _keep(self, known: "OrderedDict[str, Future[Grade]]", key: str, verdict: "Future[Grade]") -> None:
        known[key] = verdict
        if len(known) > self._size:
            known.popitem(last=False)

    def _key(self, work: Verification) -> str:
        content = json.dumps([self._timeout_s, *work._replace(note="")])
        return hashlib.blake2b(content.encode(), digest_size=_KEY_CHARS // 2).hexdigest()


class GraderPool:
    """Grades batches of responses; may be shared by threads.

    `num_workers` verifications run at once; `timeout_s` bounds the running time of each one. No process is started
    before the first verification that needs one. `config` says which kind of grader grades what (its own time limit
    aside); without it that is `math`. `judge_cache`: the folder of a judge's verdicts; None: they are not kept.
    `others`: kinds that requests may bring along, so that the modules of their functions are loaded with the worker.
    `execution`: where reward models score.

    The same texts get the same verdict from the same grader as long as the pool lives, unless the first one was a
    crash; `memo_size=0` remembers nothing. `timeouts_file` keeps the time-outs for a later pool.
    """

    def __init__(
        self,
        num_workers: int,
        timeout_s: float,
        config: GradingConfig | None = None,
        judge_cache: Path | None = None,
        others: Sequence[GraderKind] = (),
        memo_size: int = MEMO_SIZE,
        timeouts_file: Path | None = None,
        execution: ExecutionConfig | None = None,
    ) -> None:
        self._timeout_s = timeout_s
        self._config = config or GradingConfig()
        kinds = (*self._config.kinds, *others)
        self._functions = tuple(dict.fromkeys(path for kind in kinds for path in functions_of(kind)))
        self._memo = VerdictMemo(timeout_s, memo_size, timeouts_file)
        self._workers = Workers(self._functions)
        self._threads = ThreadPoolExecutor(num_workers, thread_name_prefix="grader")
        self._own = threading.local()
        """`worker`: that of a thread."""
        self._judges = Judges(judge_cache)
        self._programs = Programs(num_workers)
        self._scored_kinds = reward_models(kinds)
        self._execution = execution or ExecutionConfig()
        self._code_kinds = [leaf for kind in kinds for leaf in leaves(kind) if isinstance(leaf, CodeGrader)]
        self._lock = threading.Lock()
        self._closed = False

    @classmethod
    def configured(
        cls,
        execution: ExecutionConfig,
        config: GradingConfig,
        judge_cache: Path,
        others: Sequence[GraderKind] = (),
        *,
        check_functions: bool = True,
    ) -> "GraderPool":
        """The pool that an experiment's `grading` describes.

        Raises as `check_functions` does; without it only when a function or model is needed.
        """
        timeouts_file, workers = judge_cache.with_name(TIMEOUTS_FILE), execution.grader_workers
        pool = cls(
            workers, config.timeout_s, config, judge_cache, others, timeouts_file=timeouts_file, execution=execution
        )
        try:
            if check_functions:
                pool.check_functions()
        except BaseException:
            pool.close()
            raise
        return pool

    def check_functions(self) -> None:
        """Load the configured custom functions in a worker; ConfigError for one that cannot be called.

        UserError where the sandbox of a configured grader `code` does not run, or a reward model cannot be loaded.
        """
        for model in self._scored_kinds:
            self._reward_models.load(model)
        for kind in self._code_kinds:
            self._programs.check(kind)
        self._verdicts([Verification(LOAD, function, "") for function in self._functions])

    def grade(self, requests: Sequence[GradeRequest]) -> list[Grade]:
        """Return one grade per request, in order.

        LuffyError when the pool is closed or no worker can start; LostError when the grading server is killed again and
        again; DataError for a grader that a problem names and that does not exist; ConfigError for a custom function
        that cannot be imported and a judge that refuses.
        """
        if self._closed:
            raise LuffyError(_CLOSED)
        kinds = [self.kind_of(request) for request in requests]
        wanted = [steps(kind, request) for kind, request in zip(kinds, requests, strict=True)]
        open_steps = dict.fromkeys(step for needed in wanted for step in needed if not isinstance(step, Grade))
        found = self._verdicts(open_steps)
        return [
            conclude(kind, iter([step if isinstance(step, Grade) else found[step] for step in needed]))
            for kind, needed in zip(kinds, wanted, strict=True)
        ]

    def grade_one(self, response: str, gold: str, *, kind: GraderKind | None = None) -> Grade:
        return self.grade([GradeRequest(response, gold, kind=kind)])[0]

    def close(self) -> None:
        """End all workers; a `grade` in flight on another thread raises LuffyError. May be called again."""
        with self._lock:
            already, self._closed = self._closed, True
        if already:
            return
        self._judges.close()
        self._programs.close()
        if "_reward_models" in vars(self):
            self._reward_models.close()
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._workers.interrupt()
        self._threads.shutdown()
        self._workers.close()

    def __enter__(self) -> "GraderPool":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @cached_property
    def _reward_models(self) -> "RewardModels":
        from luffy.grading.reward_model import RewardModels  # loads torch, which other graders can do without

        return RewardModels(self._execution)

    def worker_pids(self) -> list[int]:
        return self._workers.pids()

    def kind_of(self, request: GradeRequest) -> GraderKind:
        """Return what grades `request`; DataError where its problem names a grader that does not exist."""
        if request.kind is not None:
            return request.kind
        name = request.problem.grader
        try:
            return self._config.grader(name, request.problem.data_source)
        except KeyError:
            known = ", ".join(self._config.names)
            raise DataError(
                f"reward_model.style: no grader is called {name!r}; there are {known} (add others to grading.named)"
            ) from None

    def _verdicts(self, wanted: Iterable[_Open]) -> dict[_Open, Grade]:
        wanted = list(wanted)
        claimed = {step: self._memo.claim(step, self._start) for step in wanted if isinstance(step, Verification)}
        for work, (verdict, is_new) in claimed.items():
            if is_new and work.check == CODE:
                verdict.add_done_callback(partial(self._note_program, work))
        judging = {step: self._judges.submit(step) for step in wanted if isinstance(step, JudgeRequest)}
        graded: dict[_Open, Grade] = {}
        if scored := [step for step in wanted if isinstance(step, RewardRequest)]:
            graded.update(self._reward_models.grade(scored).items())
        for work, (verdict, is_new) in claimed.items():  # each grade gets the answer, time and note of this request
            grade = _result(verdict)
            answer, seconds = None if work.check == "custom" else work.answer, grade.seconds if is_new else 0.0
            graded[work] = replace(grade, extracted=answer, seconds=seconds).saying(work.note)
        return graded | {step: _result(verdict) for step, verdict in judging.items()}

    def _start(self, work: Verification) -> "Future[Grade]":
        if work.check == CODE:
            return self._programs.submit(work)
        try:
            return self._threads.submit(self._verified, work)
        except RuntimeError:
            self._refuse_if_closed()
            raise

    def _verified(self, work: Verification) -> Grade:
        """Verify in the worker of this thread."""
        found: Grade | None = None
        try:
            found = self._run(work)
            return found
        finally:
            self._memo.settle(work, found)

    def _note_program(self, work: Verification, verdict: "Future[Grade]") -> None:
        has_failed = verdict.cancelled() or verdict.exception() is not None
        self._memo.settle(work, None if has_failed else verdict.result())

    def _run(self, work: Verification) -> Grade:
        """Return the grade of a verification. LostError when the server died repeatedly.

        A worker that had been idle may have died before it got the work, and with a dead server all of its workers die:
        only the death of one that was forked for the work, and whose server lived on, may come from the work.
        """
        deaths = losses = 0
        while True:
            worker: WorkerProcess | None = getattr(self._own, "worker", None)
            try:
                if worker is None or worker.is_gone:
                    worker = self._own.worker = self._workers.start()
            except LuffyError as error:
                self._refuse_if_closed()
                losses += 1
                if isinstance(error, LostError) and losses <= _MOST_LOSSES:
                    continue  # its server died before it was ready
                raise
            worker.begin(work)
            started = time.monotonic()
            reply = worker.reply(self._timeout_s)
            seconds = time.monotonic() - started
            self._refuse_if_closed()
            if reply is None:
                worker.kill()
                return replace(timed_out(self._timeout_s), seconds=seconds)
            if worker.is_gone and reply.outcome is Outcome.CRASHED:
                is_to_blame = worker.is_fresh and not worker.is_lost
                deaths, losses = deaths + is_to_blame, losses + (not is_to_blame)
                if losses > _MOST_LOSSES:
                    raise LostError(SERVER_DIED)
                if not is_to_blame or deaths == 1:
                    continue
            worker.is_fresh = False
            if reply.misconfigured:
                raise ConfigError(f"grading: {reply.reason}")
            if reply.outcome is Outcome.CRASHED:
                logger.warning("grading by %s crashed: %s", work.check, reply.reason)
            return Grade(reply.outcome, None, reply.reason, seconds, reply.reward)

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise LuffyError(_CLOSED_MEANWHILE)


def _result(verdict: "Future[Grade]") -> Grade:
    try:
        return verdict.result()
    except CancelledError:
        raise LuffyError(_CLOSED_MEANWHILE) from None


def _known(grade: Grade) -> "Future[Grade]":
    verdict: Future[Grade] = Future()
    verdict.set_result(grade)
    return verdict


def timed_out(timeout_s: float) -> Grade:
    """The grade of an answer whose verification reached its time limit."""
    return Grade(Outcome.TIMED_OUT, None, f"no verdict in {timeout_s:g} s")

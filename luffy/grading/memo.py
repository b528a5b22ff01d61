"""Remembers verdicts, so that a pool always gives the same verdict on the same pair of texts.

Whether a verification ends before its time limit depends on the machine, so a repetition could come out differently.
The memo prevents that: a pair that is being graded is not graded a second time, a verdict is remembered, and a pair
that timed out stays timed out. Time-outs are rare and expensive, so they are forgotten last, and a stage keeps them in
a file: when resumed, it grades new rollouts as it would have without the interruption.
"""

import hashlib
import json
import threading
from collections import OrderedDict
from concurrent.futures import Future
from pathlib import Path

from luffy.grading.request import Grade, Verification
from luffy.types import Outcome

MEMO_SIZE = 65_536
"""Verdicts and time-outs remembered, the least recently used forgotten first."""

_KEY_CHARS = 32


class VerdictMemo:
    """Verdicts by grader, texts and time limit; may be shared by threads. `size=0` remembers nothing."""

    def __init__(self, timeout_s: float, size: int = MEMO_SIZE, timeouts_file: Path | None = None) -> None:
        self._timeout_s = timeout_s
        self._size = size
        self._file = timeouts_file
        self._lock = threading.Lock()
        self._verdicts: OrderedDict[str, Future[Grade]] = OrderedDict()
        self._timeouts: OrderedDict[str, Future[Grade]] = OrderedDict()
        for key in _read(timeouts_file):
            _keep(self._timeouts, key, _done(timed_out(timeout_s)), size)

    def claim(self, work: Verification) -> tuple["Future[Grade]", bool]:
        """Return a future of the verdict on `work`, and whether the caller has to compute it."""
        key = self._key(work)
        with self._lock:
            for known in (self._verdicts, self._timeouts):
                if key in known:
                    known.move_to_end(key)
                    return known[key], False
            verdict: Future[Grade] = Future()
            if self._size:
                _keep(self._verdicts, key, verdict, self._size)
            return verdict, True

    def settle(self, work: Verification, verdict: "Future[Grade]", found: Grade | BaseException) -> None:
        """Complete `verdict` for all who wait for it, with a grade or the exception that prevented one."""
        if isinstance(found, BaseException):
            self._forget(self._key(work), verdict)
            verdict.set_exception(found)
            return
        # A crash may have come from outside (out of memory, a signal): the next time it gets a fresh chance.
        if found.outcome in (Outcome.CRASHED, Outcome.TIMED_OUT):
            self._forget(self._key(work), verdict, timed_out=found.outcome is Outcome.TIMED_OUT)
        verdict.set_result(found)

    def _forget(self, key: str, verdict: "Future[Grade]", *, timed_out: bool = False) -> None:
        with self._lock:
            if self._verdicts.get(key) is verdict:
                del self._verdicts[key]
            if timed_out and self._size:
                _keep(self._timeouts, key, verdict, self._size)
                self._write(key)

    def _write(self, key: str) -> None:
        if self._file is not None:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            with self._file.open("a", encoding="ascii") as file:
                # In one write: processes that prepare data share the file. A line that a kill cut short ends before it.
                file.write(f"\n{key}\n")

    def _key(self, work: Verification) -> str:
        content = json.dumps([self._timeout_s, *work._replace(note="")])
        return hashlib.blake2b(content.encode(), digest_size=_KEY_CHARS // 2).hexdigest()


def timed_out(timeout_s: float) -> Grade:
    """The grade of an answer whose verification reached its time limit."""
    return Grade(Outcome.TIMED_OUT, None, f"no verdict in {timeout_s:g} s")


def _keep(known: "OrderedDict[str, Future[Grade]]", key: str, verdict: "Future[Grade]", size: int) -> None:
    known[key] = verdict
    if len(known) > size:
        known.popitem(last=False)


def _done(grade: Grade) -> "Future[Grade]":
    verdict: Future[Grade] = Future()
    verdict.set_result(grade)
    return verdict


def _read(file: Path | None) -> list[str]:
    if file is None or not file.exists():
        return []
    return [line for line in file.read_text(encoding="ascii", errors="replace").split("\n") if len(line) == _KEY_CHARS]

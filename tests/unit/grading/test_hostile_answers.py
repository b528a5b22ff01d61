"""Twenty thousand hostile answers: nothing hangs, nothing dies, memory stays bounded, every outcome has its reason."""

import threading
import time
from collections import Counter
from contextlib import contextmanager, suppress

import psutil
import pytest
from synthetic.answers import hostile_answers
from synthetic.graders import CHOICE, EXACT, FORMAT, MATH, PREFERRED, STRICT, any_of, weighted

from luffy.grading.pool import GraderPool
from luffy.grading.request import GradeRequest
from luffy.grading.worker import MEMORY_LIMIT_BYTES
from luffy.types import Outcome

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]  # a minute or two on two free cores
COUNT, ENDLESS, TIMEOUT_S = 20_000, 12, 2.0
KINDS = (MATH, MATH, MATH, STRICT, PREFERRED, any_of(MATH, STRICT), CHOICE, EXACT, weighted((1.0, MATH), (0.1, FORMAT)))
GOLDS = ("3", "x^2+1", r"\{1,2\}")


@contextmanager
def watched(pool):
    """The largest memory of this process and of its workers, sampled."""
    largest, stop = {"own": psutil.Process().memory_info().rss, "worker": 0}, threading.Event()

    def sample():
        while not stop.wait(0.1):
            largest["own"] = max(largest["own"], psutil.Process().memory_info().rss)
            for pid in pool.worker_pids():
                with suppress(psutil.NoSuchProcess):
                    largest["worker"] = max(largest["worker"], psutil.Process(pid).memory_info().rss)

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    yield largest
    stop.set()
    thread.join()


def test_hostile_answers_neither_hang_nor_kill_nor_go_unnamed():
    requests = [
        GradeRequest(f"\\boxed{{{answer}}}", GOLDS[index % len(GOLDS)], kind=KINDS[index % len(KINDS)])
        for index, answer in enumerate(hostile_answers(COUNT, seed=5, endless=ENDLESS))
    ]
    before, started = psutil.Process().memory_info().rss, time.monotonic()
    with GraderPool(4, TIMEOUT_S) as pool:
        with watched(pool) as largest:
            grades = [grade for start in range(0, COUNT, 2000) for grade in pool.grade(requests[start : start + 2000])]
        assert pool.grade_one(r"\boxed{x+1}", "1+x").outcome is Outcome.CORRECT
        pids = pool.worker_pids()
    seconds, outcomes = time.monotonic() - started, Counter(grade.outcome for grade in grades)
    print(f"{seconds:.0f} s", dict(outcomes), Counter(grade.reason.split(":")[0] for grade in grades).most_common(20))
    assert len(grades) == COUNT and all(grade.reason for grade in grades)
    assert outcomes[Outcome.TIMED_OUT] >= ENDLESS // 4  # the other half met kinds that compute nothing
    assert largest["own"] - before < 300 << 20
    assert largest["worker"] < MEMORY_LIMIT_BYTES
    assert not any(psutil.pid_exists(pid) for pid in pids)

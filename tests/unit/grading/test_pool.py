"""The pool of killable workers, with real processes and real nasty answers."""

import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from support.patience import PATIENCE_S, wait_until, wait_until_ended

from luffy.errors import EXIT_TEMPORARY, LostError, LuffyError
from luffy.grading.pool import GraderPool
from luffy.grading.request import GradeRequest
from luffy.types import Outcome

LIMIT_S = 5.0
"""For pools where one answer runs into the limit and another must not, on a machine that has little time for them."""

HANGS = r"\boxed{(1+\sqrt{2}+\sqrt{3}+\sqrt{5}+\sqrt{7}+\sqrt{11})^{60}}"
"""An honest formula, which nothing refuses and nobody waits for."""
SLOW = [GradeRequest(HANGS.replace("60", "7").replace("11", number), "3") for number in ("11", "13", "17", "19")]
WORKING_CPU_S = 0.3
"""A worker is forked with all that it needs loaded: one that has used this much is in the middle of an answer."""


def test_the_server_of_the_workers_loads_neither_the_configuration_nor_http():
    """Every stage that grades waits for it."""
    code = "import sys, luffy.grading.worker, luffy.grading.checks; "
    code += "sys.exit(any(name in sys.modules for name in ('pydantic', 'httpx')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


DEEP = "{" * 2000 + "1" + "}" * 2000, "(" * 1500 + "1" + ")" * 1500, "\\frac{" * 500, "9" * 4000 + "x"


@pytest.mark.parametrize("answer", [*DEEP, "\ud800 5", "5\x00", "__import__('os').system('exit')", "\u202e123"])
def test_nasty_answers_are_never_correct_and_never_break_the_pool(pool, answer):
    assert pool.grade_one(f"\\boxed{{{answer}}}", "x+1").outcome is not Outcome.CORRECT
    assert pool.grade_one(r"\boxed{1+x}", "x + 1").outcome is Outcome.CORRECT


def test_a_hanging_verification_and_a_stopped_worker_time_out_and_the_others_are_graded():
    with GraderPool(num_workers=1, timeout_s=LIMIT_S) as pool:
        grades = pool.grade([GradeRequest(HANGS, "3"), GradeRequest(r"\boxed{x+1}", "1+x")])
        assert [grade.outcome for grade in grades] == [Outcome.TIMED_OUT, Outcome.CORRECT]
        pids = pool.worker_pids()
        os.kill(pids[0], signal.SIGSTOP)
        assert pool.grade_one(r"\boxed{x+2}", "1+x").outcome is Outcome.TIMED_OUT
    assert not any(psutil.pid_exists(pid) for pid in pids)


def is_at_work(pid):
    """The worker has computed for longer than it takes to begin."""
    return psutil.Process(pid).cpu_times().user > WORKING_CPU_S


def kill_the_grading_worker(pool, killed):
    """Kill the worker of a pool of one, once it is at work; `killed` are those that were killed before."""
    wait_until(lambda: any(is_at_work(pid) for pid in set(pool.worker_pids()) - killed))
    (pid,) = pool.worker_pids()
    killed.add(pid)
    os.kill(pid, signal.SIGKILL)


def test_an_answer_whose_two_workers_are_killed_is_a_crash_and_they_are_replaced(caplog):
    with GraderPool(num_workers=1, timeout_s=PATIENCE_S) as pool, ThreadPoolExecutor(1) as thread:
        crashing = thread.submit(pool.grade_one, HANGS, "3")
        killed: set[int] = set()
        kill_the_grading_worker(pool, killed)
        kill_the_grading_worker(pool, killed)
        assert crashing.result(PATIENCE_S).outcome is Outcome.CRASHED
        assert "grading by math crashed: the worker died" in caplog.text
        assert pool.grade_one(r"\boxed{x+2}", "2+x").outcome is Outcome.CORRECT
        assert len(killed) == 2
        assert not killed & set(pool.worker_pids())


def kill_the_server_of(pool):
    """As the out-of-memory killer does; returns once its workers are gone, too."""
    workers = [psutil.Process(pid) for pid in pool.worker_pids()]
    workers[0].parent().kill()
    wait_until_ended(workers)


@pytest.mark.parametrize("victim", ["server", "workers"])
def test_the_death_of_what_waited_for_work_is_no_verdict(victim):
    with GraderPool(num_workers=2, timeout_s=PATIENCE_S) as pool:
        pool.grade(SLOW)
        assert len(pool.worker_pids()) == 2
        if victim == "server":
            kill_the_server_of(pool)
        else:
            for pid in pool.worker_pids():
                os.kill(pid, signal.SIGKILL)
        assert pool.grade_one(r"\boxed{x+1}", "1+x").outcome is Outcome.CORRECT
        assert pool.grade_one(r"\boxed{x+2}", "1+x").outcome is Outcome.WRONG


def test_answers_whose_server_is_killed_are_graded_by_another_one():
    with GraderPool(num_workers=2, timeout_s=PATIENCE_S) as pool, ThreadPoolExecutor(1) as thread:
        grading = thread.submit(pool.grade, SLOW)
        wait_until(pool.worker_pids)
        kill_the_server_of(pool)
        assert [grade.outcome for grade in grading.result(PATIENCE_S)] == [Outcome.WRONG] * 4


def test_a_server_that_is_killed_again_and_again_ends_the_stage_as_a_lost_process():
    with GraderPool(num_workers=1, timeout_s=PATIENCE_S) as pool, ThreadPoolExecutor(1) as thread:
        grading = thread.submit(pool.grade_one, HANGS, "3")
        while not grading.done():
            wait_until(lambda: grading.done() or any(is_at_work(pid) for pid in pool.worker_pids()))
            if not grading.done():
                kill_the_server_of(pool)
        with pytest.raises(LostError, match="grading server was killed") as caught:
            grading.result()
        assert caught.value.exit_code == EXIT_TEMPORARY
        assert pool.grade_one(r"\boxed{x+1}", "1+x").outcome is Outcome.CORRECT


@pytest.mark.parametrize(
    ("ends_with", "error", "message"),
    [("kill -9 $$", LostError, r"exit code -9.*short of memory"), ("exit 1", LuffyError, "did not start")],
)
def test_a_server_that_ends_while_it_loads_says_so(monkeypatch, tmp_path, ends_with, error, message):
    program = tmp_path / "python"
    program.write_text(f"#!/bin/sh\n{ends_with}\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    with GraderPool(1, PATIENCE_S) as pool, pytest.raises(error, match=message):
        pool.grade_one(r"\boxed{x+1}", "1+x")


def test_a_timeout_is_remembered_by_its_pool_and_by_the_next_one_that_reads_its_file(tmp_path):
    file, longer = tmp_path / "stage" / "timed_out.txt", HANGS.replace("60", "61")
    with GraderPool(1, 0.5, timeouts_file=file) as pool:
        first = pool.grade_one(HANGS, "3")
        assert first.outcome is Outcome.TIMED_OUT
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(pool, "_threads", None)  # nothing can reach a worker
            assert pool.grade_one(HANGS, "3").outcome is Outcome.TIMED_OUT
    with file.open("a") as torn:
        torn.write("0123")  # what a kill leaves of a line
    with GraderPool(1, 0.5, timeouts_file=file) as pool:
        assert pool.grade_one(HANGS, "3") == first
        assert pool.worker_pids() == []
        assert pool.grade_one(longer, "3").outcome is Outcome.TIMED_OUT
    with GraderPool(1, 0.5, timeouts_file=file) as pool:
        assert pool.grade_one(longer, "3").outcome is Outcome.TIMED_OUT
        assert pool.worker_pids() == []
    with GraderPool(1, 0.001, timeouts_file=file) as pool:
        assert pool.grade_one(SLOW[0].response, "3").outcome is Outcome.TIMED_OUT
    with GraderPool(1, PATIENCE_S, timeouts_file=file) as pool:  # another limit
        assert pool.grade_one(SLOW[0].response, "3").outcome is Outcome.WRONG


def test_a_pair_requested_by_several_threads_is_graded_once():
    with GraderPool(num_workers=4, timeout_s=1.0) as pool, ThreadPoolExecutor(4) as threads:
        grades = list(threads.map(lambda _: pool.grade_one(HANGS, "3"), range(4)))
    assert {grade.outcome for grade in grades} == {Outcome.TIMED_OUT}
    assert sum(grade.seconds > 0 for grade in grades) == 1


def test_threads_share_a_pool_and_a_worker_outlives_the_thread_that_started_it():
    with GraderPool(num_workers=2, timeout_s=PATIENCE_S) as pool:
        asking = threading.Thread(target=pool.grade_one, args=(r"\boxed{x+1}", "1+x"))
        asking.start()
        asking.join()
        (pid,) = pool.worker_pids()
        time.sleep(0.3)
        assert psutil.pid_exists(pid)
        with ThreadPoolExecutor(8) as threads:
            grades = list(threads.map(lambda n: pool.grade_one(rf"\boxed{{{n}+x}}", f"x+{n}"), range(40)))
        assert {grade.outcome for grade in grades} == {Outcome.CORRECT}
        assert pid in pool.worker_pids()


def test_several_verifications_run_at_once_and_closing_ends_them_and_may_be_repeated():
    with GraderPool(num_workers=3, timeout_s=PATIENCE_S) as pool, ThreadPoolExecutor(1) as thread:
        hanging = thread.submit(pool.grade, [GradeRequest(HANGS.replace("60", str(n)), "3") for n in (60, 61, 62)])
        wait_until(lambda: sum(is_at_work(pid) for pid in pool.worker_pids()) == 3)
        pool.close()
        with pytest.raises(LuffyError, match="closed"):
            hanging.result(PATIENCE_S)
    with pytest.raises(LuffyError, match="closed"):
        pool.grade([])


def test_a_worker_inherits_no_lock(pool, tmp_path):
    with (tmp_path / "lock").open("w") as lock, GraderPool(num_workers=1, timeout_s=PATIENCE_S) as fresh:
        os.set_inheritable(lock.fileno(), True)
        fresh.grade_one(r"\boxed{x+1}", "1+x")
        (pid,) = fresh.worker_pids()
        opened = {str(descriptor.readlink()) for descriptor in Path(f"/proc/{pid}/fd").iterdir()}
    assert lock.name not in opened


def test_workers_die_with_a_killed_parent():
    program = (
        "from luffy.grading.pool import GraderPool\n"
        "from luffy.grading.request import GradeRequest\n"
        "pool = GraderPool(1, 600.0)\n"
        "pool.grade([GradeRequest(r'\\boxed{x+1}', '1+x')])\n"
        "print(*pool.worker_pids(), flush=True)\n"
        f"pool.grade([GradeRequest(r'{HANGS}', '3')])\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        worker = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
    wait_until(lambda: not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE)

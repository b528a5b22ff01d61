"""The order of verifications, without processes."""

from concurrent.futures import Future
from signal import Signals
from typing import cast

import pytest

from luffy.grading.pool import OVERTAKING_S, Job, JobQueue
from luffy.grading.request import Verification
from luffy.grading.workers import WorkerProcess


class Paused:
    """A worker that only counts how often it was paused."""

    def __init__(self) -> None:
        self.num_pauses = 0

    def signal(self, sent: Signals) -> None:
        self.num_pauses += sent is Signals.SIGSTOP


def job(name: str, submitted: float = 0.0) -> Job:
    return Job(Verification("math", name, ""), Future(), submitted)


def names(queue: JobQueue, count: int) -> list[str]:
    taken = [queue.take() for _ in range(count)]
    return [job.work.answer for job in taken if job is not None]


@pytest.fixture
def queue() -> JobQueue:
    return JobQueue()


def aside(queue: JobQueue, job: Job, most: int = 8) -> bool:
    return queue.put_aside(job, cast("WorkerProcess", Paused()), most)


def test_a_job_is_put_aside_for_earlier_work_and_goes_on_before_much_later_work(queue: JobQueue) -> None:
    assert not aside(queue, job("a"))  # nothing is queued
    queue.submit([job("late", OVERTAKING_S + 1)])
    assert not aside(queue, job("a"))
    queue.submit([job("b"), job("c")])
    queue.submit([job("d"), job("e", OVERTAKING_S - 1)])
    assert aside(queue, job("a"))
    assert names(queue, 6) == ["b", "c", "d", "e", "a", "late"]


def test_jobs_that_were_put_aside_do_not_overtake_each_other_again(queue: JobQueue) -> None:
    queue.submit([job("short")])
    first, second = job("first", 1.0), job("second", 2.0)
    assert aside(queue, first)
    assert aside(queue, second)
    assert names(queue, 2) == ["short", "first"]
    assert not aside(queue, first)


def test_the_number_of_jobs_put_aside_is_bounded(queue: JobQueue) -> None:
    queue.submit([job("short")])
    assert aside(queue, job("a"), most=1)
    assert not aside(queue, job("b"), most=1)


def test_closing_returns_the_remaining_jobs(queue: JobQueue) -> None:
    waiting = job("a")
    queue.submit([waiting])
    assert queue.close() == [waiting]
    assert queue.take() is None
    assert not queue.submit([job("b")])

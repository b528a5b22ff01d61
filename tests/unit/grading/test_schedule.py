"""The order of verifications, without processes."""

from concurrent.futures import Future
from typing import cast

import pytest

from luffy.grading.process import WorkerProcess
from luffy.grading.request import Verification
from luffy.grading.schedule import OVERTAKING_S, Job, Schedule


class Paused:
    """A worker that only counts how often it was paused."""

    def __init__(self) -> None:
        self.num_pauses = 0

    def pause(self) -> None:
        self.num_pauses += 1


def job(name: str, submitted: float = 0.0) -> Job:
    return Job(Verification("math", name, ""), Future(), submitted)


def names(schedule: Schedule, count: int) -> list[str]:
    taken = [schedule.take() for _ in range(count)]
    return [job.work.answer for job in taken if job is not None]


@pytest.fixture
def schedule() -> Schedule:
    return Schedule()


def aside(schedule: Schedule, job: Job, most: int = 8) -> bool:
    return schedule.put_aside(job, cast("WorkerProcess", Paused()), most)


def test_jobs_are_taken_in_the_order_of_their_submission(schedule: Schedule) -> None:
    schedule.submit([job("a"), job("b")])
    schedule.submit([job("c")])
    assert names(schedule, 3) == ["a", "b", "c"]


def test_a_job_put_aside_comes_after_the_others(schedule: Schedule) -> None:
    schedule.submit([job("b"), job("c", OVERTAKING_S - 1)])
    assert aside(schedule, job("a"))
    assert names(schedule, 3) == ["b", "c", "a"]


def test_work_that_comes_much_later_does_not_overtake(schedule: Schedule) -> None:
    schedule.submit([job("b"), job("late", OVERTAKING_S + 1)])
    assert aside(schedule, job("a"))
    assert names(schedule, 3) == ["b", "a", "late"]


def test_a_job_that_nobody_waits_behind_goes_on(schedule: Schedule) -> None:
    assert not aside(schedule, job("a"))
    schedule.submit([job("late", OVERTAKING_S + 1)])
    assert not aside(schedule, job("a"))


def test_jobs_that_were_put_aside_do_not_overtake_each_other_again(schedule: Schedule) -> None:
    schedule.submit([job("short")])
    first, second = job("first", 1.0), job("second", 2.0)
    assert aside(schedule, first)
    assert aside(schedule, second)
    assert names(schedule, 2) == ["short", "first"]
    assert not aside(schedule, first)


def test_no_more_than_a_number_are_put_aside_at_a_time(schedule: Schedule) -> None:
    schedule.submit([job("short")])
    assert aside(schedule, job("a"), most=1)
    assert not aside(schedule, job("b"), most=1)


def test_closing_returns_what_nobody_will_take_up(schedule: Schedule) -> None:
    waiting = job("a")
    schedule.submit([waiting])
    assert schedule.close() == [waiting]
    assert schedule.take() is None
    assert not schedule.submit([job("b")])

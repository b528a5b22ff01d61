"""The lock between steps and weight updates: fair, with a time limit, released after errors."""

import statistics
import threading
import time

import pytest
from patience import PATIENCE_S

from luffy.errors import LuffyError
from luffy.rollout.vllm_engine import FairLock


def started(target) -> threading.Thread:
    thread = threading.Thread(target=target, daemon=True)
    thread.start()
    return thread


def test_a_thread_waits_for_about_one_turn_of_each_other_thread() -> None:
    lock, stop, had = FairLock(timeout_s=PATIENCE_S), threading.Event(), []

    def step() -> None:
        while not stop.is_set():
            with lock.held():
                had.append(None)
                time.sleep(0.002)

    threads = [started(step) for _ in range(2)]
    waits = []
    for _ in range(40):
        before = len(had)
        with lock.held():
            waits.append(len(had) - before)
    stop.set()
    for thread in threads:
        thread.join(timeout=PATIENCE_S)
    # The median: the scheduler may suspend this thread between counting and asking for the lock.
    assert 1 <= statistics.median(waits) <= 3


def test_a_wait_times_out_and_leaves_the_lock_usable() -> None:
    lock = FairLock(timeout_s=0.05)
    with lock.held(), pytest.raises(LuffyError, match=r"busy for 0\.05 s"), lock.held():
        raise AssertionError("nobody released the lock")
    with lock.held():
        pass


def test_the_lock_is_released_after_an_error() -> None:
    lock = FairLock(timeout_s=PATIENCE_S)
    with pytest.raises(KeyError), lock.held():
        raise KeyError
    with lock.held():
        pass

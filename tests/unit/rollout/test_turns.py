"""The lock between steps and updates: fair, bounded, and free of its dead."""

import statistics
import threading
import time

import pytest
from patience import PATIENCE_S

from luffy.errors import LuffyError
from luffy.rollout.turns import Turns


def started(target) -> threading.Thread:
    thread = threading.Thread(target=target, daemon=True)
    thread.start()
    return thread


def test_whoever_asks_waits_for_about_one_turn_of_each_other_thread() -> None:
    turns, stop, had = Turns(timeout_s=PATIENCE_S), threading.Event(), []

    def step() -> None:
        while not stop.is_set():
            with turns.turn():
                had.append(None)
                time.sleep(0.002)

    threads = [started(step) for _ in range(2)]
    waits = []
    for _ in range(40):
        before = len(had)
        with turns.turn():
            waits.append(len(had) - before)
    stop.set()
    for thread in threads:
        thread.join(timeout=PATIENCE_S)
    # The median: a thread that the system puts aside between the counting and the asking says nothing of the lock.
    assert 1 <= statistics.median(waits) <= 3


def test_a_wait_has_a_bound_and_leaves_nothing_behind() -> None:
    turns = Turns(timeout_s=0.05)
    turns.take()
    with pytest.raises(LuffyError, match=r"busy for 0\.05 s"), turns.turn():
        raise AssertionError("nobody gave the turn back")
    turns.give()
    with turns.turn():
        pass


def test_a_turn_ends_with_an_error_in_it_and_may_be_given_back_by_another_thread() -> None:
    turns = Turns(timeout_s=PATIENCE_S)
    with pytest.raises(KeyError), turns.turn():
        raise KeyError
    turns.take()
    started(turns.give).join(timeout=PATIENCE_S)
    with turns.turn():
        pass

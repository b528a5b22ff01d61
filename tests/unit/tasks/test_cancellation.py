"""What a flow does when it is cancelled from the UI."""

import signal
import threading
import uuid
from types import SimpleNamespace

import pytest
from support.patience import PATIENCE_S, wait_until

from luffy.tasks import session as cancellation

RUN = uuid.uuid4()


class Api:
    """A server that says CANCELLING, and then no more."""

    def __init__(self):
        self.asked = 0

    def read_flow_run(self, flow_run):
        assert flow_run == RUN
        self.asked += 1
        if self.asked > 1:
            raise ConnectionError("the server is gone")
        return SimpleNamespace(state=SimpleNamespace(type=SimpleNamespace(value="CANCELLING")))

    def set_flow_run_state(self, flow_run, state, force):
        raise ConnectionError("the server is gone")


@pytest.fixture
def cancelled(monkeypatch):
    """A run that is being cancelled, the signals that this process gets, and what threads leave unhandled."""
    got, unhandled = [], []
    monkeypatch.setattr(cancellation, "_POLL_S", 0.01)
    monkeypatch.setattr(cancellation, "_SETTLE_S", 0.05)
    monkeypatch.setattr(cancellation, "get_client", lambda **options: Api())
    monkeypatch.setattr(threading, "excepthook", lambda unhappy: unhandled.append(unhappy.exc_value))
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, lambda number, frame: got.append(number)) for number in numbers}
    yield got, unhandled
    for number, handler in before.items():
        signal.signal(number, handler)


def wait_for_the_end():
    for thread in threading.enumerate():
        if thread.name in ("cancellation", "cancelled"):
            thread.join(PATIENCE_S)
    for thread in threading.enumerate():  # the second is started by the first
        if thread.name == "cancelled":
            thread.join(PATIENCE_S)


@pytest.mark.parametrize("worker_s", [0.0, 0.05])
@pytest.mark.parametrize(("ignored", "expected"), [(False, signal.SIGINT), (True, signal.SIGTERM)])
def test_the_process_gets_a_signal_that_it_heeds_once_its_worker_had_time(cancelled, ignored, expected, worker_s):
    """A server that is gone by then costs no traceback."""
    got, unhandled = cancelled
    if ignored:  # as in a script's background
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    cancellation._watch(RUN, threading.Event(), worker_s)
    wait_for_the_end()
    assert (got, unhandled) == ([expected], [])


def test_a_run_that_its_worker_ends_in_time_gets_no_second_signal(cancelled, monkeypatch):
    got, _ = cancelled
    api, ended = Api(), threading.Event()
    monkeypatch.setattr(cancellation, "get_client", lambda **options: api)
    watch = threading.Thread(target=cancellation._watch, args=(RUN, ended, PATIENCE_S))
    watch.start()
    wait_until(lambda: api.asked)
    ended.set()
    watch.join(PATIENCE_S)
    assert not watch.is_alive()
    assert got == []

"""Requests to stop, whenever they come."""

import sys

from support.patience import ran

# A second signal after each line that the handler of the first one runs, each time in a process of its own.
INTERRUPTED_HANDLERS = """
import os, signal, sys
from luffy import stop_request

stop_request.receive_stop_requests()

def interrupted_after(lines):
    left = lines
    def trace(frame, event, argument):
        nonlocal left
        left -= 1
        if not left:
            signal.raise_signal(signal.SIGTERM)
        return trace
    with stop_request.deferring_stop_requests(3600.0, lambda: None):
        sys.settrace(trace)
        signal.raise_signal(signal.SIGUSR1)
        sys.settrace(None)
        assert stop_request.stop_is_requested()
    return left <= 0

for lines in range(1, 200):
    if (child := os.fork()) == 0:
        signal.alarm(60)
        os._exit(0 if interrupted_after(lines) else 1)
    if status := os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
        print("ended" if status == 1 else f"stuck after line {lines}: {status}")
        break
"""


def test_a_signal_may_interrupt_the_handler_of_another():
    done = ran([sys.executable, "-c", INTERRUPTED_HANDLERS])
    assert done.stdout == "ended\n", done.stderr

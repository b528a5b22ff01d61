"""The grading processes: a server that loads the graders, and the workers that it forks.

Started by `luffy.grading.workers` alone: `python -m luffy.grading.worker CONTROL_FD PARENT_PID [FUNCTION ...]`.
A worker reads work and answers with verdicts. The server dies with the pool, and the workers with the server.
"""

import contextlib
import gc
import logging
import os
import resource
import signal
import socket
import sys
from collections.abc import Sequence
from multiprocessing.connection import Connection

from luffy.grading.request import LOAD, READY, Reply, Verification, receive, send
from luffy.processes import die_with
from luffy.types import Outcome

MEMORY_LIMIT_BYTES = 2 << 30
"""Address space of a worker. A verification needs under 0.1 GB; one that wants 2 GB will not end in time either."""


def main(control_fd: int, parent_pid: int, functions: Sequence[str]) -> None:
    """Fork a worker for each connection that comes in, until the pool closes the control socket."""
    die_with(parent_pid, signal.SIGKILL)
    for number in (signal.SIGINT, signal.SIGTERM):  # the pool decides when to end
        signal.signal(number, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT_BYTES, MEMORY_LIMIT_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    logging.disable(logging.CRITICAL)

    # Imported here: the parent's death must already be watched while sympy loads.
    from luffy.grading import checks

    checks.warm_up()
    gc.collect()
    gc.freeze()  # what the workers share stays shared: a collection would write to every page
    control = socket.socket(fileno=control_fd)
    control.send(READY.encode())
    connection_fd = _fork_workers(control)
    if connection_fd is not None:
        control.close()
        _work(Connection(connection_fd), functions)


def _fork_workers(control: socket.socket) -> int | None:
    """Return the connection in a new worker, and None in the server when the pool is gone."""
    server = os.getpid()
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, 64, 1)
        if not message:
            return None
        if not descriptors:
            os.waitpid(int(message), 0)
            control.send(b"collected")
            continue
        (connection_fd,) = descriptors
        pid = os.fork()
        if pid == 0:
            die_with(server, signal.SIGKILL)
            os.setsid()  # a group of its own: what a custom function starts is killed with it
            return connection_fd
        os.close(connection_fd)
        control.send(str(pid).encode())


def _work(connection: Connection, functions: Sequence[str]) -> None:
    # In each worker rather than once in the server: a user's module may start threads, which do not survive a fork.
    from luffy.grading import checks

    for function in functions:
        with contextlib.suppress(checks.UnusableFunction):  # reported when it is needed
            checks.loaded(function)
    send(connection, (READY,))
    while True:
        try:
            work = Verification(*receive(connection))
        except EOFError:
            return
        try:
            if work.check == LOAD:
                checks.loaded(work.answer)
                reply = Reply(Outcome.CORRECT, "loaded")
            else:
                reply = Reply(*checks.run_check(work.check, work.answer, work.gold, work.context))
        except checks.UnusableFunction as error:
            reply = Reply(Outcome.CRASHED, str(error), misconfigured=True)
        except Exception as error:  # noqa: BLE001 - the libraries raise anything; it has to be named
            reply = Reply(Outcome.CRASHED, f"the check raised {type(error).__name__}: {str(error)[:200]}")
        send(connection, reply)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])

"""A grading process: reads work, answers with verdicts, dies with its parent.

Started by `luffy.grading.pool` alone: `python -m luffy.grading.worker FD PARENT_PID [FUNCTION ...]`.
"""

import contextlib
import ctypes
import logging
import os
import resource
import signal
import sys
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection

from luffy.grading.protocol import Reply, receive_work, send_ready, send_reply
from luffy.grading.request import Work
from luffy.types import Outcome

MEMORY_LIMIT_BYTES = 2 << 30
"""Address space of a worker. A verification needs under 0.1 GB; one that wants 2 GB will not end in time either."""

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int) -> None:
    """Ask the kernel to kill this process when its parent ends; end now if that has already happened."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(1)


def main(connection_fd: int, parent_pid: int, functions: Sequence[str] = ()) -> None:
    """Serve until the pool closes the connection; `functions` are imported first."""
    die_with_parent(parent_pid)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the pool decides when to end
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT_BYTES, MEMORY_LIMIT_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    logging.disable(logging.CRITICAL)

    # Imported here: the parent's death must already be watched while sympy loads.
    from luffy.grading import checks, custom

    for function in functions:
        with contextlib.suppress(custom.NoSuchFunction):  # whoever asks for it is told
            custom.preload(function)
    checks.warm_up()
    connection = Connection(connection_fd)
    send_ready(connection)
    while True:
        try:
            work = receive_work(connection)
        except EOFError:
            return
        send_reply(connection, _reply(work, checks.run_check, custom.NoSuchFunction))


def _reply(
    work: Work, check: Callable[..., tuple[Outcome, str, float | None]], misconfigured: type[Exception]
) -> Reply:
    try:
        return Reply(*check(work.check, work.answer, work.gold, work.context))
    except misconfigured as error:
        return Reply(Outcome.CRASHED, str(error), misconfigured=True)
    except Exception as error:  # noqa: BLE001 - the libraries raise anything; it has to be named
        return Reply(Outcome.CRASHED, f"the check raised {type(error).__name__}: {str(error)[:200]}")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])

"""A grading process: reads pairs, answers with outcomes, dies with its parent.

Started by `luffy.grading.pool` alone: `python -m luffy.grading.worker FD PARENT_PID`.
"""

import ctypes
import logging
import os
import resource
import signal
import sys
from multiprocessing.connection import Connection

from luffy.grading.protocol import READY, receive_pair, send_word

MEMORY_LIMIT_BYTES = 2 << 30
"""Address space of a worker. A verification needs under 0.1 GB; one that wants 2 GB will not end in time either."""

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int) -> None:
    """Ask the kernel to kill this process when its parent ends; end now if that has already happened."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(1)


def main(connection_fd: int, parent_pid: int) -> None:
    """Serve until the pool closes the connection."""
    die_with_parent(parent_pid)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the pool decides when to end
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT_BYTES, MEMORY_LIMIT_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    logging.disable(logging.CRITICAL)

    # Imported here: the parent's death must already be watched while sympy loads.
    from luffy.grading.verify import verify_answer

    connection = Connection(connection_fd)
    send_word(connection, READY)
    while True:
        try:
            pair = receive_pair(connection)
        except EOFError:
            return
        send_word(connection, verify_answer(*pair))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))

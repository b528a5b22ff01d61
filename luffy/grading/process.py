"""One grading process seen from its parent: start it, ask it under a deadline, kill it."""

import contextlib
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

import luffy
from luffy.errors import LuffyError
from luffy.grading.protocol import Reply, receive_ready, receive_reply, send_work
from luffy.grading.request import Work
from luffy.types import Outcome

STARTUP_TIMEOUT_S = 120.0
"""A worker imports sympy in 0.5 s; a cold disk under load has been seen to need 20 s."""

SENDING_TIMEOUT_S = 10.0
"""A message longer than the pipe's buffer waits for a worker that reads, which an idle one does at once."""


class WorkerProcess:
    """A spawned worker. The kernel kills it when the *thread* that made this object ends, so that thread must last.

    A fresh interpreter inherits one file descriptor, its end of the connection: no lock and no socket of the parent.
    """

    def __init__(self, functions: Sequence[str] = ()) -> None:
        self.is_gone = False
        """Whether it has been killed, or has died."""
        self._ending = threading.Lock()
        self._connection, remote = Pipe(duplex=True)
        _bound_sending(self._connection)
        try:
            self._process = _start(remote, functions)
        finally:
            remote.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_until_ready(self) -> None:
        """Return when the worker has loaded; LuffyError when it cannot."""
        try:
            if self._connection.poll(STARTUP_TIMEOUT_S) and receive_ready(self._connection):
                return
        except (EOFError, OSError):
            pass  # it died while loading; its own message is on stderr
        self.kill()
        raise LuffyError(
            f"a grading worker did not start (exit code {self._process.returncode}); "
            "check that `python -c 'import math_verify'` works in this environment"
        )

    def check(self, work: Work, timeout_s: float) -> Reply:
        """Return the worker's verdict; `TIMED_OUT` means that the worker is gone, `CRASHED` that it may be."""
        try:
            send_work(self._connection, work)
            if self._connection.poll(timeout_s):
                return receive_reply(self._connection)
        except (EOFError, OSError):
            self.kill()
            return Reply(Outcome.CRASHED, "the worker died")
        self.kill()
        return Reply(Outcome.TIMED_OUT, f"no verdict in {timeout_s:g} s")

    def kill(self) -> None:
        """End the process, and what it started, with SIGKILL and collect it; may be called again."""
        self.is_gone = True
        with self._ending:
            self._kill_group()
            self._process.wait()
        self._connection.close()

    def interrupt(self) -> None:
        """Send SIGKILL from another thread; whoever waits in `check` sees the worker die."""
        with self._ending:
            self._kill_group()

    def _kill_group(self) -> None:
        # Until it has been waited for, the worker's number is its own and that of its group, though it be dead.
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)


def _bound_sending(connection: Connection) -> None:
    """Let a send fail that the other end does not take up: a stopped worker must not hold its parent."""
    with socket.socket(fileno=os.dup(connection.fileno())) as pipe:
        pipe.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(SENDING_TIMEOUT_S), 0))


def _start(remote: Connection, functions: Sequence[str]) -> subprocess.Popen[bytes]:
    # The worker must import the luffy that is running, not one that happens to be installed or lie in the directory.
    root = str(Path(luffy.__file__).parents[1])
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "luffy.grading.worker", str(remote.fileno()), str(os.getpid()), *functions],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        # sympy walks sets: with a hash seed of its own, each worker would walk them in another order.
        env={**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": "0"},
        pass_fds=(remote.fileno(),),
        start_new_session=True,  # a group of its own: what a custom function starts is killed with it
    )

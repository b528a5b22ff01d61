"""One grading process seen from its parent: start it, ask it under a deadline, kill it."""

import os
import subprocess
import sys
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

import luffy
from luffy.errors import LuffyError
from luffy.grading.protocol import READY, receive_outcome, receive_word, send_pair
from luffy.types import Outcome

STARTUP_TIMEOUT_S = 120.0
"""A worker imports sympy in 0.5 s; a cold disk under load has been seen to need 20 s."""


class WorkerProcess:
    """A spawned worker. The kernel kills it when the *thread* that made this object ends, so that thread must last.

    A fresh interpreter inherits one file descriptor, its end of the connection: no lock and no socket of the parent.
    """

    def __init__(self) -> None:
        self._connection, remote = Pipe(duplex=True)
        try:
            self._process = _start(remote)
        finally:
            remote.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_until_ready(self) -> None:
        """Return when the worker has loaded; LuffyError when it cannot."""
        try:
            if self._connection.poll(STARTUP_TIMEOUT_S) and receive_word(self._connection) == READY:
                return
        except (EOFError, OSError):
            pass  # it died while loading; its own message is on stderr
        self.kill()
        raise LuffyError(
            f"a grading worker did not start (exit code {self._process.returncode}); "
            "check that `python -c 'import math_verify'` works in this environment"
        )

    def verify(self, answer: str, ground_truth: str, timeout_s: float) -> Outcome:
        """Return the worker's verdict; `TIMED_OUT` or `CRASHED` mean that the worker is gone."""
        try:
            send_pair(self._connection, (answer, ground_truth))
            if self._connection.poll(timeout_s):
                return receive_outcome(self._connection)
        except (EOFError, OSError):
            self.kill()
            return Outcome.CRASHED
        self.kill()
        return Outcome.TIMED_OUT

    def kill(self) -> None:
        """End the process with SIGKILL and collect it; may be called again."""
        self._process.kill()
        self._process.wait()
        self._connection.close()

    def interrupt(self) -> None:
        """Send SIGKILL from another thread; whoever waits in `verify` sees the worker die."""
        self._process.kill()


def _start(remote: Connection) -> subprocess.Popen[bytes]:
    # The worker must import the luffy that is running, not one that happens to be installed or lie in the directory.
    root = str(Path(luffy.__file__).parents[1])
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "luffy.grading.worker", str(remote.fileno()), str(os.getpid())],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": path},
        pass_fds=(remote.fileno(),),
    )

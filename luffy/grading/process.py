"""One grading worker seen from its parent: give it work, wait for its verdict, pause it, kill it."""

import os
import signal
import socket
import struct
import threading
from multiprocessing import Pipe
from multiprocessing.connection import Connection

import psutil

from luffy.errors import LostError, LuffyError
from luffy.grading.fork_server import STARTUP_TIMEOUT_S, ForkServer
from luffy.grading.messages import Reply, receive_ready, receive_reply, send_work
from luffy.grading.request import Verification
from luffy.processes import signal_group
from luffy.types import Outcome

SERVER_DIED = "the grading server was killed (is this machine short of memory?); the same command continues"
SENDING_TIMEOUT_S = 10.0
"""A message longer than the pipe's buffer waits for a worker that reads, which an idle one does at once."""


class WorkerProcess:
    """A worker with a process group of its own. It inherits no lock and no socket of this process."""

    def __init__(self, server: ForkServer) -> None:
        self.is_gone = False
        """Whether it has been killed, or has died."""
        self.is_lost = False
        """Whether it died with the server from which it was forked: that says nothing of its work."""
        self.is_fresh = True
        """Whether it has not waited for work between two jobs, where anything may have killed it."""
        self._server = server
        self._ending = threading.Lock()
        self._is_collected = False
        self._connection, remote = Pipe(duplex=True)
        _limit_sending(self._connection)
        with remote:
            self.pid, self._start = server.fork(remote.fileno())

    def wait_until_ready(self) -> None:
        """Return when the worker has loaded the user's functions; LuffyError when it cannot, LostError where its server
        has died."""
        why = "did not start; its last message is on stderr"
        try:
            if not self._connection.poll(STARTUP_TIMEOUT_S):
                why = f"did not start in {STARTUP_TIMEOUT_S:g} s; does the import of a custom grader's module end?"
            elif receive_ready(self._connection):
                return
        except (EOFError, OSError):
            pass  # it died while loading
        self.kill()
        if self.is_lost:
            raise LostError(SERVER_DIED)
        raise LuffyError(f"a grading worker {why}")

    def begin(self, work: Verification) -> None:
        """Hand over work. A worker that has died says so in `reply`."""
        try:
            send_work(self._connection, work)
        except OSError:
            self.kill()

    def reply(self, timeout_s: float) -> Reply | None:
        """Return the verdict on the work that was handed over, None when there is none after `timeout_s`.

        `CRASHED` with `is_gone` means that the worker has died.
        """
        try:
            if not self.is_gone:
                return receive_reply(self._connection) if self._connection.poll(timeout_s) else None
        except (EOFError, OSError):
            self.kill()
        return Reply(Outcome.CRASHED, "the worker died")

    def cpu_seconds(self) -> float:
        """CPU time that the worker has used since it was forked; 0 once it has died."""
        try:
            times = psutil.Process(self.pid).cpu_times()
        except psutil.NoSuchProcess:
            return 0.0
        return float(times.user + times.system)

    def pause(self) -> None:
        """Stop the worker where it is, until `resume`."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let a paused worker go on."""
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        """End the process, and what it started, with SIGKILL and collect it; may be called again."""
        self.is_gone = True
        with self._ending:
            if not self._is_collected:
                signal_group(self.pid, signal.SIGKILL)
                self.is_lost = not self._server.collect(self.pid, self._start)
                self._is_collected = True
        self._connection.close()

    def interrupt(self) -> None:
        """Send SIGKILL from another thread; `reply` then sees the worker die."""
        self._signal(signal.SIGKILL)

    def _signal(self, sent: signal.Signals) -> None:
        # Until the process is reaped, its process id, which names its group, is not reused, even if it is dead.
        with self._ending:
            if not self._is_collected:
                signal_group(self.pid, sent)


def _limit_sending(connection: Connection) -> None:
    """Limit the time of a send, so that a stopped worker cannot block its parent."""
    with socket.socket(fileno=os.dup(connection.fileno())) as pipe:
        pipe.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(SENDING_TIMEOUT_S), 0))

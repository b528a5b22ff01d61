"""The worker processes of a pool, seen from their parent, and the server that forks them.

The server has loaded the graders, and forks workers from itself in milliseconds. Loading sympy and the first use of its
grammars take a second of CPU time: a pool pays for it once, so that a worker killed at its time limit costs nothing
more.
"""

import os
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from multiprocessing import Pipe
from pathlib import Path
from signal import Signals

import luffy
from luffy.errors import LostError, LuffyError
from luffy.grading.request import READY, Reply, Verification, receive, send
from luffy.processes import signal_group
from luffy.types import Outcome

LOADING_TIMEOUT_S = 120.0
"""Loading takes about 1 s; a cold disk under load has been seen to need 20 s."""
STARTUP_TIMEOUT_S = 120.0
"""A forked worker only imports what a custom grader needs."""
SERVER_DIED = "the grading server was killed (is this machine short of memory?); the same command continues"
SENDING_TIMEOUT_S = 10.0
"""A message longer than the pipe's buffer waits for a worker that reads, which an idle one does at once."""


class ForkServer:
    """Forks workers; started by the first `fork`, and again by the next one where it has died.

    The kernel kills it when this process ends, and its workers with it, as it kills the workers with a server that
    something else has ended, such as the out-of-memory killer.
    """

    def __init__(self, functions: Sequence[str] = ()) -> None:
        self._functions = functions
        self._asking = threading.Lock()
        self._ending = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._num_starts = 0
        self._is_ready = False
        self._closed = False

    def fork(self, connection_fd: int) -> tuple[int, int]:
        """Return the process id of a new worker that serves `connection_fd`, and the number of the server's start.

        LuffyError when there can be none; LostError when the server was killed or is silent.
        """
        with self._asking:
            if self._control is not None:
                try:
                    return self._forked(self._control, connection_fd)
                except OSError:
                    self._kill()  # it has died since the last fork
            try:
                control, remote = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                self._control = control
                control.settimeout(LOADING_TIMEOUT_S)
                with remote, self._ending:
                    if self._closed:
                        raise ConnectionAbortedError("the pool is closed")
                    self._is_ready = False
                    self._num_starts += 1
                    self._process = _spawned(remote.fileno(), self._functions)
                if _received(control) != READY.encode():
                    raise ConnectionResetError("no sign of life")
                self._is_ready = True
                return self._forked(control, connection_fd)
            except OSError as error:
                process = self._process
                self._kill()
                code = None if process is None else process.returncode
                why = f"a grading worker did not start (exit code {code}: {error})"
                if code == -Signals.SIGKILL:  # by something else, or just now, since it was silent
                    raise LostError(f"{why}; is this machine short of memory? The same command continues") from None
                raise LuffyError(
                    f"{why}; check that `python -c 'import math_verify'` works in this environment"
                ) from None

    def collect(self, pid: int, start: int) -> bool:
        """Reap a worker that has been killed. Until then its process id is not reused.

        Returns whether the server from which it was forked, by its `start`, has outlived it: where it has not, the
        kernel has killed the worker, whatever it was doing, and init collects it.
        """
        with self._asking:
            if self._control is None or start != self._num_starts:
                return False
            try:
                self._control.send(str(pid).encode())
                _received(self._control)
            except OSError:
                self._kill()
                return False
            return True

    def interrupt_loading(self) -> None:
        """Kill a server that is still loading, from any thread; there will be no other one."""
        with self._ending:
            self._closed = True
            if self._process is not None and not self._is_ready:
                self._process.kill()

    def close(self) -> None:
        """End the server. Its workers have been collected before."""
        with self._asking:
            self._closed = True
            self._kill()

    def _forked(self, control: socket.socket, connection_fd: int) -> tuple[int, int]:
        socket.send_fds(control, [b"fork"], [connection_fd])
        return int(_received(control)), self._num_starts

    def _kill(self) -> None:
        with self._ending:
            control, self._control = self._control, None
            process, self._process = self._process, None
            if process is not None:
                process.kill()
                process.wait()
        if control is not None:
            control.close()


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
        with socket.socket(fileno=os.dup(self._connection.fileno())) as pipe:
            # A worker that somebody has stopped must not block its parent in a send.
            pipe.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(SENDING_TIMEOUT_S), 0))
        with remote:
            self.pid, self._start = server.fork(remote.fileno())

    def wait_until_ready(self) -> None:
        """Return when the worker has loaded the user's functions; LuffyError when it cannot, LostError where its server
        has died."""
        why = "did not start; its last message is on stderr"
        try:
            if not self._connection.poll(STARTUP_TIMEOUT_S):
                why = f"did not start in {STARTUP_TIMEOUT_S:g} s; does the import of a custom grader's module end?"
            elif receive(self._connection) == [READY]:
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
            send(self._connection, work._replace(note=""))
        except OSError:
            self.kill()

    def reply(self, timeout_s: float) -> Reply | None:
        """Return the verdict on the work that was handed over, None when there is none after `timeout_s`.

        `CRASHED` with `is_gone` means that the worker has died.
        """
        try:
            if not self.is_gone:
                if not self._connection.poll(timeout_s):
                    return None
                outcome, *rest = receive(self._connection)
                if outcome == READY:  # said twice: a server that was killed had just forked a first worker on this pipe
                    return self.reply(timeout_s)
                return Reply(Outcome(outcome), *rest)
        except (EOFError, OSError):
            self.kill()
        return Reply(Outcome.CRASHED, "the worker died")

    def kill(self) -> None:
        """End the process, and what it started, with SIGKILL and collect it; may be called again."""
        self.is_gone = True
        with self._ending:
            if not self._is_collected:
                signal_group(self.pid, Signals.SIGKILL)
                self.is_lost = not self._server.collect(self.pid, self._start)
                self._is_collected = True
        self._connection.close()

    def interrupt(self) -> None:
        """End the process from any thread: `reply` then sees the worker die."""
        # Until the process is reaped, its process id, which names its group, is not reused, even if it is dead.
        with self._ending:
            if not self._is_collected:
                signal_group(self.pid, Signals.SIGKILL)


class Workers:
    """Starts workers and knows those that live. May be shared by threads."""

    def __init__(self, functions: Sequence[str] = ()) -> None:
        self._server = ForkServer(functions)
        self._lock = threading.Lock()
        self._live: set[WorkerProcess] = set()
        self._closing = False

    def start(self) -> WorkerProcess:
        """A new worker that is ready; LuffyError when it cannot start, LostError when the grading server is gone."""
        worker = WorkerProcess(self._server)
        with self._lock:
            self._live = {each for each in self._live if not each.is_gone} | {worker}
            closing = self._closing
        if closing:
            worker.interrupt()
        worker.wait_until_ready()
        return worker

    def pids(self) -> list[int]:
        with self._lock:
            return [worker.pid for worker in self._live if not worker.is_gone]

    def interrupt(self) -> None:
        """Kill all workers, and the server if it is still loading: whoever waits for one sees it die."""
        with self._lock:
            self._closing = True
            live = list(self._live)
        self._server.interrupt_loading()
        for worker in live:
            worker.interrupt()

    def close(self) -> None:
        """End all processes. Nobody uses them any more."""
        with self._lock:
            live = list(self._live)
        for worker in live:
            worker.kill()
        self._server.close()


def _received(control: socket.socket) -> bytes:
    """The server's next message; ConnectionResetError when it has died."""
    message = control.recv(64)
    if not message:
        raise ConnectionResetError("it has died; its own message is on stderr")
    return message


def _spawned(control_fd: int, functions: Sequence[str]) -> subprocess.Popen[bytes]:
    """Start the server from a thread that lives as long as the server: to the kernel, that thread is its parent."""
    # The worker must import the luffy that is running, not one that happens to be installed or lie in the directory.
    root = str(Path(luffy.__file__).parents[1])
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    started: Future[subprocess.Popen[bytes]] = Future()

    def keep() -> None:
        try:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "luffy.grading.worker", str(control_fd), str(os.getpid()), *functions],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                # sympy walks sets: with a hash seed of its own, each run would walk them in another order.
                env={**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": "0"},
                pass_fds=(control_fd,),
                start_new_session=True,
            )
        except BaseException as error:  # noqa: BLE001 - whoever waits for the process gets it
            started.set_exception(error)
        else:
            started.set_result(process)
            process.wait()

    threading.Thread(target=keep, name="grading-server", daemon=True).start()
    return started.result()

"""A process that has loaded the graders, and forks workers from itself in milliseconds.

Loading sympy and the first use of its grammars take a second of CPU time. A pool pays for it once, so that a worker
killed at its time limit costs nothing more.
"""

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path

import luffy
from luffy.errors import LostError, LuffyError
from luffy.grading.messages import READY

STARTUP_TIMEOUT_S = 120.0
"""Loading takes about 1 s; a cold disk under load has been seen to need 20 s."""


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
                return self._forked(self._started(), connection_fd)
            except OSError as error:
                raise self._failure(error) from None

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

    def _failure(self, error: OSError) -> LuffyError:
        process = self._process
        self._kill()
        code = None if process is None else process.returncode
        why = f"a grading worker did not start (exit code {code}: {error})"
        if code == -signal.SIGKILL:  # by something else, or just now, since it was silent
            return LostError(f"{why}; is this machine short of memory? The same command continues")
        return LuffyError(f"{why}; check that `python -c 'import math_verify'` works in this environment")

    def _started(self) -> socket.socket:
        control, remote = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control = control
        control.settimeout(STARTUP_TIMEOUT_S)
        with remote, self._ending:
            if self._closed:
                raise ConnectionAbortedError("the pool is closed")
            self._is_ready = False
            self._num_starts += 1
            self._process = _spawned(remote.fileno(), self._functions)
        if _received(control) != READY.encode():
            raise ConnectionResetError("no sign of life")
        self._is_ready = True
        return control

    def _kill(self) -> None:
        with self._ending:
            control, self._control = self._control, None
            process, self._process = self._process, None
            if process is not None:
                process.kill()
                process.wait()
        if control is not None:
            control.close()


def _received(control: socket.socket) -> bytes:
    """The server's next message; ConnectionResetError when it has died."""
    message = control.recv(64)
    if not message:
        raise ConnectionResetError("it has died; its own message is on stderr")
    return message


def _spawned(control_fd: int, functions: Sequence[str]) -> subprocess.Popen[bytes]:
    """Start the server from a thread that lives as long as the server: to the kernel, that thread is its parent."""
    started: Future[subprocess.Popen[bytes]] = Future()

    def keep() -> None:
        try:
            process = _spawn(control_fd, functions)
        except BaseException as error:  # noqa: BLE001 - whoever waits for the process gets it
            started.set_exception(error)
        else:
            started.set_result(process)
            process.wait()

    threading.Thread(target=keep, name="grading-server", daemon=True).start()
    return started.result()


def _spawn(control_fd: int, functions: Sequence[str]) -> subprocess.Popen[bytes]:
    # The worker must import the luffy that is running, not one that happens to be installed or lie in the directory.
    root = str(Path(luffy.__file__).parents[1])
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "luffy.grading.worker", str(control_fd), str(os.getpid()), *functions],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        # sympy walks sets: with a hash seed of its own, each run would walk them in another order.
        env={**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": "0"},
        pass_fds=(control_fd,),
        start_new_session=True,
    )

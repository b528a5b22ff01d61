"""An interpreter's process seen from outside: its start, its control socket, its output, its CPU time and its end."""

import asyncio
import contextlib
import errno
import json
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import psutil

from luffy.errors import LuffyError
from luffy.processes import signal_group
from luffy.sandbox.interpreter import READY, Settings

START_TIMEOUT_S = 120.0
"""A start takes a few hundredths of a second; where hundreds start at once, each waits for the others."""

PYTHON_OPTIONS = ("-S", "-s", "-P", "-B")
"""Nothing is imported from site-packages, the home or the working directory, and no bytecode is written."""

ENVIRONMENT = {
    "HOME": "/tmp",  # noqa: S108 - the sandbox's own
    "LANG": "C",
    "PYTHONUTF8": "1",
    "PYTHONHASHSEED": "0",  # the same code prints its sets in the same order
    "TZ": "UTC",
    "USER": "sandbox",
    **dict.fromkeys(("MKL_NUM_THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1"),
}
"""The whole environment of the code."""

_READ_BYTES = 1 << 16
_LONGEST_REPLY = 256
_CLOCK_OF_PROCESS = 2
"""The kernel's clock of a process's CPU time has the id `(~pid << 3) | 2` (`man 3 clock_getcpuclockid`)."""


class InterpreterProcess:
    """A running interpreter, and the processes started around it. Its user decides when it has to end."""

    def __init__(self, popen: "subprocess.Popen[bytes]", control: socket.socket, output_fd: int) -> None:
        self._popen = popen
        self._control = control
        self.output_fd = output_fd
        """Where standard output and error arrive. Reading it does not block."""
        self._pid: int | None = None
        self._pidfd = -1
        self._folder_fd = -1
        self._cpu_s = 0.0
        self._releasing = threading.Lock()
        self._owner = os.getpid()
        control.setblocking(False)
        os.set_blocking(output_fd, False)

    @classmethod
    def spawn(cls, command: Sequence[str], settings: Settings, inherited: Sequence[int]) -> "InterpreterProcess":
        """Start `command`, which runs the interpreter's file.

        To be called from a thread that lasts as long as the process should: the kernel takes it for the parent.
        """
        with ExitStack() as on_failure:
            control, remote = socket.socketpair()
            output_fd, written_fd = os.pipe()
            for end in (control, remote):
                on_failure.callback(end.close)
            for end_fd in (output_fd, written_fd):
                on_failure.callback(os.close, end_fd)
            popen = subprocess.Popen(
                [*command, str(remote.fileno()), json.dumps(settings)],
                stdin=subprocess.DEVNULL,
                stdout=written_fd,
                stderr=written_fd,
                env={},
                pass_fds=(remote.fileno(), *inherited),
                start_new_session=True,
            )
            on_failure.pop_all()
        remote.close()
        os.close(written_fd)
        return cls(popen, control, output_fd)

    def attach(self, pid: int) -> None:
        """Tell which process is the interpreter; when it ends, everything that its code has started must end."""
        self._pid, self._pidfd = pid, os.pidfd_open(pid)

    def count_files(self, folder: str) -> None:
        """Let `num_files` count what is on the file system of `folder`, as the interpreter sees it."""
        self._folder_fd = os.open(f"/proc/{self._pid}/root{folder}", os.O_PATH | os.O_DIRECTORY)

    async def wait_until_ready(self) -> None:
        """Return when the interpreter takes requests; LuffyError with its own words when it does not start."""
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                if await self._receive() == READY:
                    return
        except (TimeoutError, ConnectionError):
            pass
        said = (self.read_output() or b"").decode(errors="replace").split("\n")
        raise LuffyError(f"a sandboxed interpreter did not start: {next(filter(None, reversed(said)), 'no message')}")

    async def ask(self, request: bytes) -> bytes:
        """Send a request and return the reply: anything, since code can write it; empty when the socket is closed."""
        try:
            await asyncio.get_running_loop().sock_sendall(self._control, request)
            return await self._receive()
        except ConnectionError:
            return b""

    def read_output(self) -> bytes | None:
        """What has been printed and not been read; None when there is nothing, empty when nothing can come any more."""
        try:
            return os.read(self.output_fd, _READ_BYTES)
        except BlockingIOError:
            return None

    def cpu_s(self) -> float:
        assert self._pid is not None
        with contextlib.suppress(OSError):  # it has died
            self._cpu_s = time.clock_gettime((~self._pid << 3) | _CLOCK_OF_PROCESS)
        return self._cpu_s

    def num_files(self) -> int:
        """Number of files and folders; 0 where they are not counted."""
        if self._folder_fd < 0:
            return 0
        size = os.fstatvfs(self._folder_fd)
        return size.f_files - size.f_ffree

    def interrupt(self) -> None:
        """Raise KeyboardInterrupt in the code that is running."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGINT)

    def kill(self) -> None:
        """End the process and all that it has started; may be called again."""
        if self._popen.returncode is not None or self.output_fd < 0:
            return
        if self._pidfd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        else:  # killed while it is still setting up, bubblewrap would leave a child that waits for it
            with contextlib.suppress(psutil.NoSuchProcess):
                for child in psutil.Process(self._popen.pid).children(recursive=True):
                    with contextlib.suppress(psutil.NoSuchProcess):
                        child.kill()
        signal_group(self._popen.pid, signal.SIGKILL)

    async def exit_code(self) -> int:
        """Wait until all processes are gone; a negative number or one above 128 stands for a signal."""
        if self._pidfd >= 0:
            await wait_readable(os.dup(self._pidfd))
        if self._popen.poll() is None:
            await wait_readable(os.pidfd_open(self._popen.pid))
        return self._popen.wait()

    def release(self) -> None:
        """Kill, and close what this process holds; may be called again, from any thread, and by the collector.

        In a process that was forked from this one it does nothing: the sandbox is not that one's.
        """
        with self._releasing:
            if self.output_fd < 0 or os.getpid() != self._owner:
                return
            self.kill()
            self._popen.poll()
            self._control.close()
            for fd in (self.output_fd, self._pidfd, self._folder_fd):
                if fd >= 0:
                    os.close(fd)
            self.output_fd = self._pidfd = self._folder_fd = -1

    async def _receive(self) -> bytes:
        loop, received = asyncio.get_running_loop(), b""
        while not received.endswith(b"\n") and len(received) < _LONGEST_REPLY:
            chunk = await loop.sock_recv(self._control, _LONGEST_REPLY)
            if not chunk:
                return b""
            received += chunk
        return received


@contextmanager
def start_errors() -> Iterator[None]:
    """Turn what the operating system refuses to a start into a LuffyError with its remedy."""
    try:
        yield
    except OSError as error:
        remedy = "; a session holds four descriptors: raise `ulimit -n`" if error.errno == errno.EMFILE else ""
        raise LuffyError(f"a sandboxed interpreter did not start: {error.strerror}{remedy}") from None


async def wait_readable(fd: int) -> None:
    """Wait until `fd` can be read, and close it."""
    loop = asyncio.get_running_loop()
    readable: asyncio.Future[None] = loop.create_future()

    def settle() -> None:
        if not readable.done():
            readable.set_result(None)

    loop.add_reader(fd, settle)
    try:
        await readable
    finally:
        loop.remove_reader(fd)
        os.close(fd)

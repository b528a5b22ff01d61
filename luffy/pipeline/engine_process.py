"""The process of a run in which stages with a vLLM engine of their own run one after the other, and share the engine.

    with EngineProcess().use():
        ...  # supervise(..., has_engine=True) runs its stages there

The process (`luffy.stages.engine_host`) starts with its first stage. It ends with a stage that fails or is stopped, so
that the next one begins in a fresh process. To its supervisor such a stage is like one in a process of its own: it has
its own log, exit code and events, is ended by the same signals, and its loss by `kill -9` is resumed.
"""

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

from luffy.errors import EXIT_INTERRUPTED, StageFailed
from luffy.pipeline.warm_start import Order, surroundings
from luffy.processes import end_processes, start_marked

_POLL_S = 0.1
_PROGRAM = "luffy.stages.engine_host"
_current: ContextVar["EngineProcess | None"] = ContextVar("engine_process", default=None)


def current_engine_process() -> "EngineProcess | None":
    return _current.get()


@dataclass(slots=True)
class HostedStage:
    """A stage in the engine process; the counterpart of `subprocess.Popen`."""

    process: subprocess.Popen[bytes]
    connection: Connection
    mark: str
    """That of the process and all that its stages start."""
    returncode: int | None = None

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def spared(self) -> int | None:
        """The process that goes on although it carries the mark; None where it has to end with the stage."""
        return self.pid if self.returncode == 0 else None

    def poll(self) -> int | None:
        """The exit code, -n for signal n; None while it runs."""
        if self.returncode is None:
            with suppress(OSError, EOFError):  # its end, which has a code
                self.returncode = self.connection.recv() if self.connection.poll() else None
            if self.returncode is None:
                self.returncode = self.process.poll()
        return self.returncode

    def wait(self) -> int:
        while (code := self.poll()) is None:
            time.sleep(_POLL_S)
        return code


class EngineProcess:
    """At most one process at a time, for stages that see the same GPUs."""

    def __init__(self) -> None:
        self._turn = threading.Condition()
        self._is_taken = False
        self._surroundings: object = None
        self._ready: HostedStage | None = None
        """The last stage, after which the process is ready for another."""
        # A thread that outlives the stages: the kernel signals the process when the thread that started it ends.
        self._starting = ThreadPoolExecutor(max_workers=1, thread_name_prefix="engine-process")

    @contextmanager
    def use(self) -> Iterator[None]:
        """Within the block `supervise` runs stages with an engine here; the process ends with the block."""
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)
            self._end()
            self._starting.shutdown()

    @contextmanager
    def turn(self, environment: Mapping[str, str], stopped: Callable[[], bool]) -> Iterator[bool]:
        """Whether a stage may `start` here, once the stage before it has ended; StageFailed once `stopped`.

        False if the process is at work on other GPUs.
        """
        wanted = surroundings(environment)
        with self._turn:
            while self._is_taken and self._surroundings == wanted:
                if stopped():
                    raise StageFailed("interrupted while waiting; the same command resumes it", EXIT_INTERRUPTED)
                self._turn.wait(_POLL_S)
            is_ours = not self._is_taken
            if is_ours:
                self._is_taken = True
                if self._surroundings != wanted:
                    self._end()
                self._surroundings = wanted
        try:
            yield is_ours
        finally:
            if is_ours:
                with self._turn:
                    self._is_taken = False
                    self._turn.notify_all()

    def start(self, command: Sequence[str], log: Path, environment: Mapping[str, str]) -> HostedStage:
        """Run `python -m MODULE ...` in this process, with its output appended to `log`."""
        order: Order = (command[2], list(command[3:]), dict(environment), str(log.resolve()))
        before = self._ready
        if before is not None and before.returncode == 0 and before.process.poll() is None:
            stage = HostedStage(before.process, before.connection, before.mark)
        else:
            self._end()
            stage = self._starting.submit(self._open, log, environment).result()
        self._ready = stage
        with suppress(OSError):  # it has died: the stage is lost
            stage.connection.send(order)
        return stage

    def _open(self, log: Path, environment: Mapping[str, str]) -> HostedStage:
        connection, far_end = Pipe()
        program = [sys.executable, "-m", "luffy.library_loading", _PROGRAM, str(far_end.fileno())]
        with log.open("ab") as out, far_end:
            process, mark = start_marked(program, out, environment, pass_fds=[far_end.fileno()])
        return HostedStage(process, connection, mark)

    def _end(self) -> None:
        """End the process if there is one; it has nothing to clean up."""
        if (stage := self._ready) is not None:
            self._ready = None
            stage.connection.close()
            stage.process.kill()
            stage.process.wait()
            end_processes(stage.mark)

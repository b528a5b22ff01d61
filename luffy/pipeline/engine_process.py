"""The process of a run in which stages with a vLLM engine of their own run one after the other, and share the engine.

    with EngineProcess().use():
        ...  # supervise(..., has_engine=True) runs its stages there

The process (`luffy.stages.engine_host`) starts with its first stage. It ends with a stage that fails or is stopped, so
that the next one begins in a fresh process. To its supervisor such a stage is like one in a process of its own: it has
its own log, exit code and events, is ended by the same signals, and its loss by `kill -9` is resumed.
"""

import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import replace
from multiprocessing import Pipe
from pathlib import Path

from luffy.errors import EXIT_INTERRUPTED, StageFailed
from luffy.pipeline.warm_start import Order, SharedStage, surroundings
from luffy.processes import end_processes, start_marked

_POLL_S = 0.1
_PROGRAM = "luffy.stages.engine_host"
_current: ContextVar["EngineProcess | None"] = ContextVar("engine_process", default=None)


def current_engine_process() -> "EngineProcess | None":
    return _current.get()


class EngineProcess:
    """At most one process at a time, for stages that see the same GPUs."""

    def __init__(self) -> None:
        self._turn = threading.Condition()
        self._is_taken = False
        self._surroundings: object = None
        self._ready: SharedStage | None = None
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

    def start(self, command: Sequence[str], log: Path, environment: Mapping[str, str]) -> SharedStage:
        """Run `python -m MODULE ...` in this process, with its output appended to `log`."""
        order: Order = (command[2], list(command[3:]), dict(environment), str(log.resolve()))
        before = self._ready
        if before is not None and before.returncode == 0 and before.process.poll() is None:
            stage = replace(before, log=log, returncode=None)
        else:
            self._end()
            stage = self._starting.submit(self._open, log, environment).result()
        self._ready = stage
        with suppress(OSError):  # it has died: the stage is lost
            stage.connection.send(order)
        return stage

    def _open(self, log: Path, environment: Mapping[str, str]) -> SharedStage:
        connection, far_end = Pipe()
        program = [sys.executable, "-m", "luffy.library_loading", _PROGRAM, str(far_end.fileno())]
        with log.open("ab") as out, far_end:
            process, mark = start_marked(program, out, environment, pass_fds=[far_end.fileno()])
        return SharedStage(process, connection, mark, process.pid, log)

    def _end(self) -> None:
        """End the process if there is one; it has nothing to clean up."""
        if (stage := self._ready) is not None:
            self._ready = None
            stage.connection.close()
            stage.process.kill()
            stage.process.wait()
            end_processes(stage.mark)

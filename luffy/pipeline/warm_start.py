"""Warm starts: stages forked from a process that has already loaded torch, transformers and deepspeed, to save seconds.

    with WarmServer(log).use():
        ...  # supervise() forks its stages from the server

It is only an optimisation: a stage that cannot start warm starts cold. It is not used on machines with a GPU: the
driver does not survive a fork, and stages there take far longer than their imports. The smoke chain takes half as long
with it (`tests/benchmarks/stage_start.py`).

The server is this module as a program: `python -m luffy.pipeline.warm_start DESCRIPTOR LIBRARY ...`. It loads the
settings of the stages, too; if a file of this package was edited meanwhile, a stage imports the whole package anew.
"""

import importlib
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

from luffy.errors import StageFailed
from luffy.library_loading import without_collections
from luffy.pipeline.inherited_environment import own_environment
from luffy.processes import MARK_VARIABLE, SUPERVISOR_VARIABLE, TITLE_VARIABLE, die_with, end_processes, start_marked

logger = logging.getLogger(__name__)
LIBRARIES = (
    "torch",
    "transformers",
    "transformers.models.qwen2.modeling_qwen2",
    "deepspeed",
    "pydantic",
    "psutil",
    "httpx",
)
"""The libraries that are slowest to import. Not pyarrow: it starts a thread, which a fork would lose."""
_SETTINGS = "luffy.config.settings"
"""What every stage needs of this package and what takes longest: hundreds of pydantic models."""
_LOAD_TIMEOUT_S = 120.0
_FORK_TIMEOUT_S = 20.0
_POLL_S = 0.1
_GPU_DEVICES = ("/dev/nvidiactl", "/dev/kfd")
# The supervisor sets these. No library that is loaded before the fork reads them.
_OWN_VARIABLES = frozenset({MARK_VARIABLE, SUPERVISOR_VARIABLE, TITLE_VARIABLE, "PYTHONUNBUFFERED"})
_WITHOUT_THREADS = {"OPENBLAS_NUM_THREADS": "1"}
"""OpenBLAS starts its threads when numpy is loaded. Stages compute with torch, which has its own."""
Order = tuple[str, list[str], dict[str, str], str]
"""The program that a forked process runs: module, arguments, environment, and the file that its output is appended
to."""
_current: ContextVar["WarmServer | None"] = ContextVar("warm_server", default=None)


def current_warm_server() -> "WarmServer | None":
    return _current.get()


def can_start_warm() -> bool:
    """Whether this machine has no GPU."""
    return not any(Path(device).exists() for device in _GPU_DEVICES)


class WarmServer:
    """A server process, which loads the libraries in the background; the kernel kills it when this process dies.

    The server and all processes of its stages carry its `mark`. It runs one stage at a time; for stages at the same
    time further servers are started, and kept.
    """

    def __init__(self, log: Path, libraries: Sequence[str] = LIBRARIES) -> None:
        self._log, self._libraries = log, libraries
        self._further: Future[WarmServer] | None = None
        # A thread that outlives the stages: the kernel kills a server when the thread that started it ends.
        self._starting = ThreadPoolExecutor(max_workers=1, thread_name_prefix="warm-server")
        self._growing = threading.Lock()
        environment = own_environment()
        self._surroundings = surroundings(environment)
        self._connection, far_end = Pipe()
        self._ready = False
        self._ordering = threading.Lock()
        self._stage: SharedStage | None = None
        variables = {**environment, TITLE_VARIABLE: "1", "PYTHONUNBUFFERED": "1", **_WITHOUT_THREADS}
        program = [sys.executable, "-m", "luffy.pipeline.warm_start", str(far_end.fileno()), *libraries]
        with log.open("ab") as out, far_end:
            # Killed with the run; its stage then gets SIGTERM.
            self._process, self.mark = start_marked(
                program, out, variables, pass_fds=[far_end.fileno()], sent=signal.SIGKILL
            )
        self.pid = self._process.pid

    @contextmanager
    def use(self) -> Iterator[None]:
        """Within the block `supervise` starts stages from this server; the server ends with the block."""
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)
            self.stop()

    def start(self, command: Sequence[str], log: Path, environment: Mapping[str, str]) -> "SharedStage | None":
        """Start `python -m MODULE ...` with its output appended to `log`; None if it must start cold."""
        is_module = list(command[:2]) == [sys.executable, "-m"]
        # Libraries read the environment when they are loaded.
        same = surroundings(environment) == self._surroundings
        if not is_module or not same or self._connection.closed or self._process.poll() is not None:
            return None
        if self._ordering.acquire(blocking=False):
            try:
                if self._stage is None or self._stage.returncode is not None:
                    return self._order(command, log, environment)
            finally:
                self._ordering.release()
        with self._growing:
            if self._connection.closed:  # it has ended
                return None
            if self._further is None:
                self._further = self._starting.submit(WarmServer, self._log, self._libraries)
        return None if self._further.exception() else self._further.result().start(command, log, environment)

    def _order(self, command: Sequence[str], log: Path, environment: Mapping[str, str]) -> "SharedStage | None":
        variables = {**environment, MARK_VARIABLE: self.mark}
        order: Order = (command[2], list(command[3:]), variables, str(log.resolve()))
        with ExitStack() as on_failure:
            # Also on Ctrl-C: a pending reply would be taken as the reply to the next order.
            on_failure.callback(self._end)
            try:
                if not self._ready:
                    self._answer(_LOAD_TIMEOUT_S)
                    self._ready = True
                self._connection.send(order)
                pid = self._answer(_FORK_TIMEOUT_S)
                self._stage = SharedStage(self._process, self._connection, self.mark, pid, log)
            except (OSError, EOFError) as error:
                logger.info("stages start without a warm server from now on: %s", error or type(error).__name__)
                return None
            on_failure.pop_all()
        return self._stage

    def _answer(self, timeout_s: float) -> int:
        if not self._connection.poll(timeout_s):
            raise TimeoutError(f"no answer within {timeout_s:.0f} s")
        return self._connection.recv()

    def stop(self) -> None:
        """End the server, the further ones, and the stages that they still run. May be called again."""
        self._end()
        self._starting.shutdown()
        if self._further is not None and not self._further.exception():
            self._further.result().stop()

    def _end(self) -> None:
        """End this server and its stage; stages start cold from now on."""
        with self._growing:
            self._connection.close()
        self._process.kill()  # it has nothing to clean up
        self._process.wait()
        end_processes(self.mark)


@dataclass(slots=True)
class SharedStage:
    """A stage in a process that runs several, or forked from one; the counterpart of `subprocess.Popen`."""

    process: subprocess.Popen[bytes]
    """The one that runs several."""
    connection: Connection
    """To it; each exit code comes from there."""
    mark: str
    """That of the process and all that its stages start."""
    pid: int
    """The stage's own; that of the process where it runs in it."""
    log: Path
    returncode: int | None = None

    def poll(self) -> int | None:
        """The exit code, -n for signal n; None while it runs. StageFailed when the server that forked it has died."""
        if self.returncode is None:
            with suppress(OSError, EOFError):  # the process has ended, which has a code
                self.returncode = self.connection.recv() if self.connection.poll() else None
            if self.returncode is None and (code := self.process.poll()) is not None:
                if self.pid != self.process.pid:
                    raise StageFailed(
                        f"was lost, because the warm server that started it died; the same command resumes it "
                        f"(log: {self.log})",
                        temporary=True,
                    )
                self.returncode = code
        return self.returncode

    def wait(self) -> None:
        """Wait until the stage has ended, or the server that forked it."""
        with suppress(StageFailed):
            while self.poll() is None:
                time.sleep(_POLL_S)

    @property
    def spared(self) -> int | None:
        """The process that goes on although it carries the mark; None where it has to end with the stage."""
        return self.process.pid if self.pid != self.process.pid or self.returncode == 0 else None


def surroundings(environment: Mapping[str, str]) -> tuple[str, dict[str, str]]:
    """What a process that has loaded its libraries already can run other programs in: the working directory and the
    environment, without what is each program's own."""
    own = {name: value for name, value in environment.items() if name not in _OWN_VARIABLES}
    return str(Path.cwd()), own


def _check_single_thread() -> None:
    """Exit if there is a second thread: a lock that it holds during a fork would stay locked in the child."""
    threads = [(thread / "comm").read_text().strip() for thread in Path("/proc/self/task").iterdir()]
    if len(threads) > 1:
        sys.exit(f"no fork with several threads: {', '.join(threads)}")


def _serve(connection: Connection) -> tuple[str, list[str]]:
    """Fork a process for each order, one at a time, and report its pid, then its exit code (-n for signal n).

    Returns only in the forked process, which is one of its own: the module to run and its arguments. The server exits
    when the other end of the connection is closed.
    """
    server = os.getpid()
    while True:
        try:
            order: Order = connection.recv()
        except EOFError:
            sys.exit(0)
        _check_single_thread()
        pid = os.fork()
        if pid == 0:
            break
        connection.send(pid)
        _, status = os.waitpid(pid, 0)
        connection.send(os.waitstatus_to_exitcode(status))
    connection.close()  # otherwise a dead server would go unnoticed
    module, arguments, environment, log_path = order
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.setsid()
    os.environ.clear()
    os.environ.update({**environment, SUPERVISOR_VARIABLE: str(server)})
    log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    Path("/proc/self/comm").write_text(module.rpartition(".")[2])
    die_with(server)
    return module, arguments


def _stamps() -> dict[Path, tuple[int, int]]:
    """Modification time and size of each file of this package."""
    stats = {file: file.stat() for file in Path(__file__).parents[1].rglob("*.py") if file.is_file()}
    return {file: (stat.st_mtime_ns, stat.st_size) for file, stat in stats.items()}


if __name__ == "__main__":
    # The run ends the server with SIGKILL. A scheduler's SIGTERM to all processes of a job must not end its stage, too.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    control = Connection(int(sys.argv[1]))
    stamps = _stamps()  # before the import, so that an edit meanwhile shows
    with without_collections():
        for library in (*sys.argv[2:], _SETTINGS):
            importlib.import_module(library)
    _check_single_thread()
    control.send(os.getpid())
    ordered = _serve(control)
    if _stamps() != stamps:  # edited meanwhile: imported anew
        for imported in [imported for imported in sys.modules if imported.partition(".")[0] == "luffy"]:
            del sys.modules[imported]
        importlib.invalidate_caches()
    from luffy.library_loading import run_module

    run_module(*ordered)

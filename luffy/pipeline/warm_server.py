"""A process that has loaded the large libraries once and forks a stage program for each order.

Started by `warm_start` as `python -m luffy.pipeline.warm_server DESCRIPTOR LIBRARY ...`. Before the fork it
imports only the standard library and these libraries: a module of this package may be edited before a stage starts.
"""

import gc
import importlib
import json
import os
import signal
import sys
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TypedDict

READY = b"ready"
_PACKAGE = "luffy"


class Order(TypedDict):
    """The program that a forked process runs."""

    module: str
    arguments: list[str]
    environment: dict[str, str]
    log: str
    """The file to which its output is appended."""


def serve(connection: Connection) -> Order:
    """Fork a process for each order, one at a time, and report its pid, then its exit code (-n for signal n).

    Returns only in the forked process. The server exits when the other end of the connection is closed.
    """
    while True:
        try:
            order: Order = json.loads(connection.recv_bytes())
        except EOFError:
            sys.exit(0)
        server = os.getpid()
        _check_single_thread()
        pid = os.fork()
        if pid == 0:
            connection.close()  # otherwise a dead server would go unnoticed
            _detach(order, server)
            return order
        connection.send_bytes(str(pid).encode())
        _, status = os.waitpid(pid, 0)
        connection.send_bytes(str(os.waitstatus_to_exitcode(status)).encode())


def load(libraries: Sequence[str]) -> None:
    """Import `libraries` without starting a thread, and exempt their objects from garbage collection."""
    # OpenBLAS starts its threads when numpy is loaded. Stages compute with torch, which has its own.
    given = os.environ.get("OPENBLAS_NUM_THREADS")
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    gc.disable()
    for name in libraries:
        importlib.import_module(name)
    gc.enable()
    gc.freeze()
    if given is None:
        del os.environ["OPENBLAS_NUM_THREADS"]
    else:
        os.environ["OPENBLAS_NUM_THREADS"] = given


def run_stage(order: Order) -> None:
    """Run the stage's module as `python -m` would."""
    for name in [name for name in sys.modules if name.partition(".")[0] == _PACKAGE]:
        del sys.modules[name]
    importlib.invalidate_caches()
    from luffy.library_loading import run_module  # imported after the fork, so never stale

    run_module(order["module"], order["arguments"])


def _detach(order: Order, server: int) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.setsid()
    os.environ.clear()
    os.environ.update(order["environment"])
    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    Path("/proc/self/comm").write_text(order["module"].rpartition(".")[2])
    from luffy.processes import SUPERVISOR_VARIABLE, die_with  # imported after the fork, so never stale

    os.environ[SUPERVISOR_VARIABLE] = str(server)
    die_with(server, signal.SIGTERM)


def _check_single_thread() -> None:
    """Exit if there is a second thread: a lock that it holds during a fork would stay locked in the child."""
    threads = [(thread / "comm").read_text().strip() for thread in Path("/proc/self/task").iterdir()]
    if len(threads) > 1:
        sys.exit(f"no fork with several threads: {', '.join(threads)}")


if __name__ == "__main__":
    # The run ends the server with SIGKILL. A scheduler's SIGTERM to all processes of a job must not end its stage, too.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    control = Connection(int(sys.argv[1]))
    load(sys.argv[2:])
    _check_single_thread()
    control.send_bytes(READY)
    run_stage(serve(control))

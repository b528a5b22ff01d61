"""Keeping a stage's processes together, so that all of them end when the stage or its supervisor does (Linux).

Every process of a stage inherits a mark in its environment. The mark finds them again, in whatever session they
put themselves, and after their parents have died. A warm server carries the mark of the stages that it forks, whose
mark is its own; it is spared when they are ended.
"""

import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable

import psutil

MARK_VARIABLE = "LUFFY_STAGE_RUN"
SUPERVISOR_VARIABLE = "LUFFY_SUPERVISOR_PID"
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)
_WATCH_S = 0.5
_GRACE_S = 5.0


def die_with(parent_pid: int, sent: signal.Signals = signal.SIGTERM) -> None:
    """Have the kernel send `sent` to this process when its parent dies; end at once if it is dead already.

    Safe between fork and exec: one system call, no import, no allocation to speak of.
    """
    _LIBC.prctl(_PR_SET_PDEATHSIG, int(sent))
    if os.getppid() != parent_pid:
        os._exit(1)


def take_supervisor() -> int | None:
    """The process that started this stage and must outlive it; None when a person started it by hand.

    Taken out of the environment, since it is true of this process alone and not of its children.
    """
    value = os.environ.pop(SUPERVISOR_VARIABLE, None)
    return int(value) if value else None


def watch_parent(parent_pid: int, orphaned: Callable[[], None]) -> None:
    """Call `orphaned` from a thread once this process has another parent than `parent_pid`.

    The kernel's signal can be missed: it is cleared by a set-user-id exec and may meet code that ignores SIGTERM.
    """

    def watch() -> None:
        while os.getppid() == parent_pid:
            time.sleep(_WATCH_S)
        orphaned()

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def marked_processes(mark: str, spared: int | None = None) -> list[psutil.Process]:
    """All live processes, this one and `spared` excepted, that carry `mark`."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid in (os.getpid(), spared) or process.status() == psutil.STATUS_ZOMBIE:
                continue
            if process.environ().get(MARK_VARIABLE) == mark:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied, OSError):
            continue  # ended meanwhile, or belongs to somebody else
    return found


def end_processes(mark: str, grace_s: float = _GRACE_S, spared: int | None = None) -> None:
    """End all processes that carry `mark`, but `spared`: SIGTERM, and after `grace_s` SIGKILL."""
    _signal(marked_processes(mark, spared), signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    while (left := marked_processes(mark, spared)) and time.monotonic() < deadline:
        time.sleep(0.05)
    # A process that is killed while it forks leaves a child behind: look again until nobody is left.
    while left:
        _signal(left, signal.SIGKILL)
        time.sleep(0.05)
        left = marked_processes(mark, spared)


def _signal(processes: list[psutil.Process], sent: signal.Signals) -> None:
    for process in processes:
        try:
            process.send_signal(sent)
        except psutil.NoSuchProcess:
            continue

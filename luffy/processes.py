"""Starting and ending child processes, so that none outlives the one that needs it (Linux).

A child can get a signal from the kernel when its parent dies (`die_with`), or be ended with all that it has started
(`end_group`).

Every process of a stage also inherits a mark in its environment. The mark finds them again, in whatever session they
put themselves, and after their parents have died. A warm server carries the mark of the stages that it forks; it is
spared when they are ended.
"""

import atexit
import contextlib
import ctypes
import os
import re
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, NoReturn

import psutil

MARK_VARIABLE = "LUFFY_STAGE_RUN"
TITLE_VARIABLE = "SPT_NOENV"
"""Where it is set, `setproctitle` writes a title over the command line only, and leaves the environment as it is.

vLLM's workers and Ray's processes give themselves titles. /proc would then no longer show their mark.
"""
SUPERVISOR_VARIABLE = "LUFFY_SUPERVISOR_PID"
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)
_WATCH_S = 0.5
_GRACE_S = 5.0
_PEAK = re.compile(r"^VmHWM:\s+(\d+) kB$", re.MULTILINE)
_began: float | None = None


def die_with(parent_pid: int, sent: signal.Signals = signal.SIGTERM) -> None:
    """Have the kernel send `sent` to this process when its parent dies; exit at once if it is dead already.

    The kernel counts the *thread* that forked as the parent: it has to last as long as the child should. Safe between
    fork and exec: one system call, no import, no allocation to speak of.
    """
    _LIBC.prctl(_PR_SET_PDEATHSIG, int(sent))
    if os.getppid() != parent_pid:
        os._exit(1)


def start_marked(
    command: Sequence[str],
    out: IO[bytes],
    environment: Mapping[str, str],
    *,
    pass_fds: Sequence[int] = (),
    sent: signal.Signals = signal.SIGTERM,
) -> tuple[subprocess.Popen[bytes], str]:
    """Start a program in a session of its own that writes to `out`; returns it and the mark of all that it starts.

    The kernel sends it `sent` when the calling *thread* ends: start it in one that outlives it.
    """
    parent, mark = os.getpid(), f"{os.getpid()}-{uuid.uuid4().hex}"
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=out,
        stderr=subprocess.STDOUT,
        env={**environment, MARK_VARIABLE: mark, SUPERVISOR_VARIABLE: str(parent)},
        pass_fds=pass_fds,
        start_new_session=True,
        preexec_fn=lambda: die_with(parent, sent),
    )
    return process, mark


def end_group(process: subprocess.Popen[bytes], grace_s: float = _GRACE_S) -> None:
    """End a child that leads a process group, and the whole group: SIGTERM, and after `grace_s` SIGKILL."""
    signal_group(process.pid, signal.SIGTERM)
    try:
        # Waited for without collecting it: until then its number cannot become another group's.
        deadline = time.monotonic() + grace_s
        while time.monotonic() < deadline and process.returncode is None:
            if os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                break
            time.sleep(0.02)
    finally:
        signal_group(process.pid, signal.SIGKILL)
        process.wait()


def signal_group(leader_pid: int, sent: signal.Signals) -> None:
    """Send `sent` to a process group; nothing happens where it has ended.

    Call it only while the leader has not been collected: its number, and the group's, may then be somebody else's.
    """
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader_pid, sent)


def exit_without_finalizing(code: int) -> NoReturn:
    """End this process with `code` once its threads have ended, its exit handlers have run and its output is written.

    The interpreter is not finalized. After a collective has returned, a worker thread of gloo still releases the
    tensors, which takes the GIL. Python ends a thread that asks for the GIL during finalization; inside a C++
    destructor that aborts the process (SIGABRT, "terminate called without an active exception"). Destroying the
    process groups does not end gloo's threads: they live as long as any reference to a group, and DeepSpeed keeps some.
    """
    threading._shutdown()  # type: ignore[attr-defined]  # as the interpreter does before its exit handlers
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # nobody reads it, or the disk is full
            stream.flush()
    os._exit(code)


def begin_stage() -> None:
    """This process turns to another stage: `stage_began` is now, and `peak_memory_bytes` counts from here."""
    global _began
    _began = time.time()
    with contextlib.suppress(OSError):  # where /proc is read-only, the peak stays that of the whole process
        Path("/proc/self/clear_refs").write_text("5")


def stage_began() -> float:
    """When this process began, or the stage that it has turned to, in seconds since the epoch."""
    return psutil.Process().create_time() if _began is None else _began


def peak_memory_bytes() -> int:
    """The peak of this process's resident set size since `stage_began`."""
    (kib,) = _PEAK.findall(Path("/proc/self/status").read_text())
    return int(kib) << 10


def take_supervisor() -> int | None:
    """The process that started this stage and has to outlive it; None when a person started it by hand.

    Removed from the environment, since it is true of this process alone and not of its children.
    """
    value = os.environ.pop(SUPERVISOR_VARIABLE, None)
    return int(value) if value else None


def watch_parent(parent_pid: int, orphaned: Callable[[], None]) -> None:
    """Call `orphaned` from a thread once this process has another parent than `parent_pid`.

    The kernel's signal can be missed: a set-user-id exec clears it, and code may ignore SIGTERM.
    """

    def watch() -> None:
        while os.getppid() == parent_pid:
            time.sleep(_WATCH_S)
        orphaned()

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def marked_processes(mark: str, spared: int | None = None) -> list[psutil.Process]:
    """Live processes that carry `mark`, without this one and `spared`."""
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
    """End all processes that carry `mark`, except `spared`: SIGTERM, and after `grace_s` SIGKILL."""
    _signal(marked_processes(mark, spared), signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    while (left := marked_processes(mark, spared)) and time.monotonic() < deadline:
        time.sleep(0.05)
    # A process that is killed while it forks leaves a child behind: look again until none is left.
    while left:
        _signal(left, signal.SIGKILL)
        time.sleep(0.05)
        left = marked_processes(mark, spared)


def _signal(processes: list[psutil.Process], sent: signal.Signals) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(sent)


def name_interface(address: str) -> None:
    """Let gloo use the network interface of this address.

    By itself it listens where this machine's host name leads, which is often the loopback address: Debian's /etc/hosts.
    """
    for name, addresses in psutil.net_if_addrs().items():
        if address in (each.address for each in addresses):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)

"""Running a stage program as a child process that never outlives its supervisor.

The child has its own session and writes to files (`log.txt`, `events.jsonl`), so that it can shut down cleanly without
the supervisor. It gets SIGTERM when the supervisor dies, whatever the cause, and also checks for that itself.

With a warm server in use the child is forked from that server, which the kernel kills with the supervisor. Stages with
a vLLM engine share a process where one is in use (`luffy.pipeline.engine_process`).
"""

import math
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO

from luffy.config import STAGE_KINDS
from luffy.errors import EXIT_INTERRUPTED, EXIT_NO_SPACE, EXIT_TEMPORARY, EXIT_USER_ERROR, StageFailed
from luffy.pipeline.disk import free_bytes
from luffy.pipeline.engine_process import current_engine_process
from luffy.pipeline.events import EVENTS_FILE, Event, EventReader
from luffy.pipeline.inherited_environment import own_environment
from luffy.pipeline.job import JOB_FILE
from luffy.pipeline.reuse import LOG_FILE
from luffy.pipeline.warm_start import SharedStage, current_warm_server
from luffy.processes import TITLE_VARIABLE, end_processes, start_marked

_POLL_S = 0.1
_TAIL_LINES = 25
_CLEAN_UP_S = 5.0
_NO_ROOM_BYTES = 1 << 20
_RESUMES = "the same command resumes it"
_INTERRUPTED = f"interrupted; {_RESUMES}"


def stage_command(stage: str, directory: Path, job: Path | None = None) -> list[str]:
    """The command line of a stage program that works in `directory`; `job`: its job, by default the one there."""
    program = [sys.executable, "-m", STAGE_KINDS[stage].program]
    return [*program, "--config", str(job or directory / JOB_FILE), "--out", str(directory)]


def supervise(
    command: Sequence[str],
    directory: Path,
    *,
    on_event: Callable[[Event], None],
    on_line: Callable[[str], None] = lambda line: None,
    environment: Mapping[str, str] | None = None,
    grace_s: float = 10.0,
    time_limit_s: float | None = None,
    stopped: Callable[[], bool] = lambda: False,
    has_engine: bool = False,
) -> None:
    """Run `command` to its end, forwarding its events and log lines as they arrive.

    However this call ends (success, failure, an exception in a callback, Ctrl-C), no process of the stage is left. The
    stage program itself is first asked to end and has `grace_s` to save its work; then all its processes get SIGTERM,
    and SIGKILL when they are still there after some seconds; SIGKILL at once on a second Ctrl-C.

    `stopped` is polled and ends the stage as Ctrl-C would, which reaches only the main thread. `time_limit_s` ends it,
    too. A stage that `has_engine` of vLLM in its process runs in the engine process in use, if that is its machine's.

    Raises StageFailed: for exit code 2 with the stage's own line, else with the end of its log.
    """
    log_path = directory / LOG_FILE
    events = EventReader(directory / EVENTS_FILE, from_end=True)
    tail: deque[str] = deque(maxlen=_TAIL_LINES)
    failure, stopped_at, deadline = "", "", math.inf if time_limit_s is None else time.monotonic() + time_limit_s

    def forward(log: IO[str]) -> None:
        nonlocal failure, stopped_at
        for line in log:
            tail.append(line.rstrip("\n"))
            on_line(line.rstrip("\n"))
        for event in events.read():
            # A waiting stage shows the progress of the one it waits for; all other events are its own.
            if event.pid == process.pid or event.kind == "progress":
                failure = event.text if event.kind == "failed" else failure
                stopped_at = event.text if event.kind == "stopped" else stopped_at
                on_event(event)

    with ExitStack() as stack:
        out = stack.enter_context(log_path.open("ab"))
        log = stack.enter_context(log_path.open(encoding="utf-8", errors="replace"))
        log.seek(0, os.SEEK_END)
        variables = {**own_environment(), **(environment or {}), "PYTHONUNBUFFERED": "1", TITLE_VARIABLE: "1"}
        process: subprocess.Popen[bytes] | SharedStage
        warm, engine = current_warm_server(), current_engine_process()
        is_hosted = has_engine and command[1] == "-m"  # as a module, which the process runs in itself
        stage: SharedStage | None = None
        if is_hosted and engine is not None and stack.enter_context(engine.turn(variables, stopped)):
            stage = engine.start(command, log_path, variables)
        elif warm is not None:
            stage = warm.start(command, log_path, variables)
        if stage is not None:
            process, mark = stage, stage.mark
        else:
            process, mark = _start_cold(command, out, variables)
        try:
            while process.poll() is None:
                forward(log)
                if stopped():
                    raise StageFailed(f"{_INTERRUPTED} (log: {log_path})", exit_code=EXIT_INTERRUPTED)
                if time.monotonic() > deadline:
                    raise StageFailed(f"has reached its time limit; {_RESUMES} (log: {log_path})")
                time.sleep(_POLL_S)
            forward(log)
        finally:
            _end(process, mark, grace_s)
    if process.returncode == EXIT_TEMPORARY and stopped_at:
        raise StageFailed(f"{stopped_at}; {_RESUMES}", exit_code=EXIT_TEMPORARY)
    if process.returncode:
        raise _failed(process.returncode, failure, tail, log_path)


def _start_cold(
    command: Sequence[str], out: IO[bytes], environment: Mapping[str, str]
) -> tuple[subprocess.Popen[bytes], str]:
    """The process, and the mark that all of its children carry. This thread stays until it has ended."""
    if command[1] == "-m" and command[2] in {kind.program for kind in STAGE_KINDS.values()}:
        command = [*command[:2], "luffy.library_loading", *command[2:]]  # which runs it, without garbage collection
    return start_marked(command, out, environment)


def _end(process: subprocess.Popen[bytes] | SharedStage, mark: str, grace_s: float) -> None:
    def end_all(patience_s: float) -> None:
        # Who carries the mark but goes on: the warm server, and a process that is ready for its next stage.
        spared = None if isinstance(process, subprocess.Popen) else process.spared
        end_processes(mark, patience_s, spared)

    with ExitStack() as stack:
        stack.callback(process.wait)
        with ExitStack() as impatient:  # after a second Ctrl-C, or SIGTERM under Prefect
            impatient.callback(end_all, 0.0)
            # Only the stage program, which needs its helper processes to finish the step.
            deadline = time.monotonic() + grace_s + _CLEAN_UP_S
            if process.poll() is None:
                with suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGUSR1)
            while process.poll() is None and time.monotonic() < deadline:
                time.sleep(_POLL_S)
            end_all(_CLEAN_UP_S)
            impatient.pop_all()


def _failed(code: int, failure: str, tail: Sequence[str], log_path: Path) -> StageFailed:
    # Without disk space the stage may be unable to write its own error, or one of its helpers may have failed. An
    # exhausted quota does not show in the number of free bytes.
    if code == EXIT_NO_SPACE and failure:
        return StageFailed(failure, exit_code=EXIT_USER_ERROR)
    if code == EXIT_NO_SPACE or (code > 0 and not failure and free_bytes(log_path) < _NO_ROOM_BYTES):
        text = f"{log_path.parent}: no space left; free some (luffy gc lists what to delete), the stage resumes"
        return StageFailed(text, exit_code=EXIT_USER_ERROR)
    if code == EXIT_USER_ERROR:
        return StageFailed(failure or (tail[-1] if tail else f"see {log_path}"), exit_code=EXIT_USER_ERROR)
    if code == EXIT_INTERRUPTED:
        return StageFailed(f"{_INTERRUPTED} (log: {log_path})", exit_code=EXIT_INTERRUPTED)
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"failed with exit code {code}"
    summary = f"{how}: {failure}" if failure else how
    # SIGKILL comes from outside: from the out-of-memory killer, or from a person.
    temporary = code in (EXIT_TEMPORARY, -signal.SIGKILL)
    return StageFailed("\n".join([f"{summary}; the end of {log_path}:", *tail]), temporary=temporary)

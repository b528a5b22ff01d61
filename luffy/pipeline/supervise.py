"""Running a stage program as a child process that never outlives its supervisor.

The child has a session of its own and writes to files (`log.txt`, `events.jsonl`), so that it can end in order when
the supervisor is gone. It gets SIGTERM when the supervisor dies, by whatever signal, and watches for that itself.
"""

import os
import signal
import subprocess
import sys
import time
import uuid
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO

from luffy.errors import EXIT_INTERRUPTED, EXIT_USER_ERROR, StageFailed
from luffy.pipeline.events import EVENTS_FILE, Event, EventReader
from luffy.pipeline.processes import MARK_VARIABLE, SUPERVISOR_VARIABLE, die_with, end_processes
from luffy.pipeline.reuse import LOG_FILE

_POLL_S = 0.1
_TAIL_LINES = 25


def stage_command(stage: str, directory: Path) -> list[str]:
    """The command line of a stage program whose job is written in `directory`."""
    program = [sys.executable, "-m", f"luffy.stages.{stage}"]
    return [*program, "--config", str(directory / "config.yaml"), "--out", str(directory)]


def supervise(
    command: Sequence[str],
    directory: Path,
    *,
    on_event: Callable[[Event], None],
    on_line: Callable[[str], None] = lambda line: None,
    environment: Mapping[str, str] | None = None,
    grace_s: float = 10.0,
) -> None:
    """Run `command` to its end, passing on its events and log lines as they come.

    Whatever ends this call (success, failure, an exception of a callback, Ctrl-C), no process of the stage is left:
    SIGTERM first, SIGKILL after `grace_s`, at once on a second Ctrl-C.

    Raises StageFailed: for exit code 2 with the stage's own line, else with the end of its log.
    """
    mark = f"{os.getpid()}-{uuid.uuid4().hex}"
    log_path = directory / LOG_FILE
    events = EventReader(directory / EVENTS_FILE, from_end=True)
    tail: deque[str] = deque(maxlen=_TAIL_LINES)
    failure = ""

    def forward(log: IO[str]) -> None:
        nonlocal failure
        for line in log:
            tail.append(line.rstrip("\n"))
            on_line(line.rstrip("\n"))
        for event in events.read():
            # A stage that waits shows the progress of the one it waits for; other events are its own.
            if event.pid == child.pid or event.kind == "progress":
                failure = event.text if event.kind == "failed" else failure
                on_event(event)

    with log_path.open("ab") as out, log_path.open(encoding="utf-8", errors="replace") as log:
        log.seek(0, os.SEEK_END)
        child = _start(command, out, mark, environment or {})
        try:
            while child.poll() is None:
                forward(log)
                time.sleep(_POLL_S)
            forward(log)
        finally:
            _end(child, mark, grace_s)
    if child.returncode:
        raise _failed(child.returncode, failure, tail, log_path)


def _start(command: Sequence[str], out: IO[bytes], mark: str, extra: Mapping[str, str]) -> subprocess.Popen[bytes]:
    parent = os.getpid()
    own = {MARK_VARIABLE: mark, SUPERVISOR_VARIABLE: str(parent), "PYTHONUNBUFFERED": "1"}
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=out,
        stderr=subprocess.STDOUT,
        env={**os.environ, **extra, **own},
        start_new_session=True,
        # The signal follows the thread that forks, which is this one, and it stays until the child has ended.
        preexec_fn=lambda: die_with(parent),
    )


def _end(child: subprocess.Popen[bytes], mark: str, grace_s: float) -> None:
    try:
        end_processes(mark, grace_s)
    except KeyboardInterrupt:  # a second Ctrl-C: no more patience
        end_processes(mark, 0.0)
        raise
    finally:
        child.wait()


def _failed(code: int, failure: str, tail: Sequence[str], log_path: Path) -> StageFailed:
    if code == EXIT_USER_ERROR:
        return StageFailed(failure or (tail[-1] if tail else f"see {log_path}"), exit_code=EXIT_USER_ERROR)
    if code == EXIT_INTERRUPTED:
        return StageFailed(f"interrupted; the same command resumes it (log: {log_path})", exit_code=EXIT_INTERRUPTED)
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"failed with exit code {code}"
    summary = f"{how}: {failure}" if failure else how
    return StageFailed("\n".join([f"{summary}; the end of {log_path}:", *tail]))

"""The event protocol between a stage program and its supervisor: JSON lines in `events.jsonl`.

The stage appends events, the supervisor reads the new ones. It is a file, not a pipe, so neither side depends on the
other being alive.
"""

import json
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Literal, get_args

from luffy.files import LineAppender

EVENTS_FILE = "events.jsonl"
EventKind = Literal["started", "waiting", "progress", "message", "finished", "failed", "stopped"]
"""`waiting`: another process, named in the text, has the stage's lock. `finished`: the manifest has been written or
found. `failed`: the text is the reason in one line. `stopped`: cleanly, after a stop request; the text says what is
kept."""
INTERRUPTED = "interrupted"
"""The text of `failed` where no fault ended the stage: Ctrl-C, or a stop request whose grace period was over."""
_KINDS = frozenset(get_args(EventKind))
_LAST_KINDS = frozenset[EventKind](("finished", "failed", "stopped"))
_PROGRESS_INTERVAL_S = 0.25
_EARLIER = "earlier_s"


@dataclass(frozen=True, slots=True)
class Event:
    """One line of `events.jsonl`."""

    kind: EventKind
    time: float
    """Seconds since the epoch."""
    pid: int
    """Process that wrote the event."""
    step: int = 0
    total: int = 0
    metrics: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    text: str = ""


class EventWriter:
    """Appends events to a file, to which several processes may write."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        self._file = LineAppender(path)
        self._clock = clock
        self._lock = threading.Lock()
        self._last_progress_time: float | None = None

    def started(self, text: str = "", *, earlier_s: float = 0.0) -> None:
        """The stage has its lock and begins to work; earlier attempts have worked for `earlier_s` seconds."""
        self.tell("started", text, metrics={_EARLIER: earlier_s})

    def progress(self, step: int, total: int, **metrics: float) -> None:
        """`step` of `total` is done. Writes at most four per second, but always the first and the last."""
        with self._lock:
            now, last = self._clock(), self._last_progress_time
            if last is not None and step < total and 0 <= now - last < _PROGRESS_INTERVAL_S:
                return
            self._last_progress_time = now
        self.tell("progress", step=step, total=total, metrics=metrics)

    def message(self, text: str) -> None:
        """A line for the user."""
        self.tell("message", text)

    def tell(self, kind: EventKind, text: str = "", **fields: object) -> None:
        """Write an event of any kind."""
        given = {"kind": kind, "time": self._clock(), "pid": os.getpid(), "text": text, **fields}
        line = json.dumps(given, ensure_ascii=False)
        with self._lock:
            self._file.append(line.encode())

    def close(self) -> None:
        self._file.close()


class EventReader:
    """Tails an event file that may not exist yet."""

    def __init__(self, path: Path, *, from_end: bool = False) -> None:
        self._path = path
        self._offset = path.stat().st_size if from_end and path.exists() else 0

    def read(self) -> list[Event]:
        """The complete events since the last call; an incomplete last line is left for the next one."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._offset)
            block = file.read()
        complete = block[: block.rfind(b"\n") + 1]
        self._offset += len(complete)
        events = []
        for line in complete.splitlines():
            with suppress(ValueError, TypeError, KeyError):  # torn when its writer was killed
                fields = json.loads(line)
                if fields["kind"] in _KINDS:
                    events.append(Event(**fields))
        return events


def seconds_of_attempts(events: Sequence[Event]) -> float:
    """Seconds of work in the newest attempt, until its last event, and in those that it counted as earlier ones."""
    begun: Event | None = None
    last_s, is_over = 0.0, True
    for event in events:
        if event.kind == "started":
            begun, last_s, is_over = event, event.time, False
        elif begun is not None and not is_over and event.pid == begun.pid and event.kind != "waiting":
            last_s, is_over = max(last_s, event.time), event.kind in _LAST_KINDS
    if begun is None:
        return 0.0
    return begun.metrics.get(_EARLIER, 0.0) + last_s - begun.time


def how_it_ended(events: Sequence[Event]) -> Literal["interrupted", "failed", "killed"]:
    """How the newest attempt ended, of a stage that is not finished and on which no process works.

    A stage that fails or is asked to end says so in its last event; one that is killed cannot.
    """
    begun = max((number for number, event in enumerate(events) if event.kind == "started"), default=0)
    last = next((event for event in reversed(events[begun:]) if event.kind in _LAST_KINDS), None)
    if last is None:
        return "killed"
    return "failed" if last.kind == "failed" and last.text != INTERRUPTED else "interrupted"

"""Forwarding of a stage's log lines to the log of its task run, each at its original level."""

import logging
import re
import time
from collections.abc import Callable
from typing import Protocol

_RECORD = re.compile(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} (DEBUG|INFO|WARNING|ERROR|CRITICAL) (.*)$")
_FOREIGN = re.compile(r"\b(WARNING|ERROR|CRITICAL)\b")
_NOISE = re.compile(r"\r|\d+%\|.*\||^\s*$")
"""Progress bars and empty lines."""
_WINDOW_S = 10.0
_MAX_LINES = 100
_MAX_LENGTH = 2_000


class Log(Protocol):
    """A logger."""

    def log(self, level: int, msg: str, *args: object) -> None: ...


class StageLog:
    """Forwards at most a hundred lines in ten seconds; the whole log is in the stage's `log.txt`."""

    def __init__(self, log: Log, clock: Callable[[], float] = time.monotonic) -> None:
        self._log = log
        self._clock = clock
        self._level = logging.INFO
        """Level of the last record, which continuation lines (such as a traceback) inherit."""
        self._window = -_WINDOW_S
        self._lines = 0
        self._dropped = 0

    def line(self, text: str) -> None:
        """Forward one line of the stage's log."""
        if _NOISE.search(text):
            return
        level, words = self._parse(text)
        if self._has_room():
            self._log.log(level, "%s", words[:_MAX_LENGTH])
        else:
            self._dropped += 1

    def _parse(self, text: str) -> tuple[int, str]:
        if record := _RECORD.match(text):
            self._level = logging.getLevelNamesMapping()[record[1]]
            return self._level, record[2]
        if text.startswith("Traceback (most recent call last)"):
            self._level = logging.ERROR
        elif foreign := _FOREIGN.search(text):
            return logging.getLevelNamesMapping()[foreign[1]], text
        return self._level, text

    def _has_room(self) -> bool:
        now = self._clock()
        if now - self._window >= _WINDOW_S:
            if self._dropped:
                self._log.log(logging.WARNING, "%s", f"{self._dropped} lines left out here; they are in log.txt")
            self._window, self._lines, self._dropped = now, 0, 0
        self._lines += 1
        return self._lines <= _MAX_LINES

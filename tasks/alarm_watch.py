"""Looks at a running stage for alarms; each kind is raised once, also when the stage is resumed.

Which alarms were raised is in `alarms.json`, in the directory of the stage or, for the disk, in that of the run. This
module does not use Prefect.
"""

import contextlib
import json
import math
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from luffy.config import ExperimentConfig
from luffy.files import replacing
from luffy.pipeline.workspace.disk import free_bytes
from luffy.tasks.alarms import Alarm, RewardHistory, SignalHistory, disk_alarm, gap_alarm, gap_bound
from luffy.tracking.metrics import METRICS_FILE, MetricRow

RAISED_FILE = "alarms.json"
_INTERVAL_S = 10.0
_GIB = 1 << 30


class NewMetrics:
    """The rows that a stage adds to its metrics file; each byte is read once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._inode = 0
        self._offset = 0

    def read(self) -> tuple[bool, list[MetricRow]]:
        """Whether the file was replaced (a resume does that) and is read from its start; the complete new rows."""
        if not self._path.exists():
            return False, []
        with self._path.open("rb") as file:
            status = os.fstat(file.fileno())
            is_other = status.st_ino != self._inode or status.st_size < self._offset
            if is_other:
                self._inode, self._offset = status.st_ino, 0
            file.seek(self._offset)
            block = file.read()
        complete = block[: block.rfind(b"\n") + 1]
        self._offset += len(complete)
        return is_other, [row for row in map(_row, complete.splitlines()) if row is not None]


class RaisedAlarms:
    """The kinds of alarms that were raised, in a file that stages of one run share."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._kinds: set[str] = set()

    def is_new(self, alarm: Alarm) -> bool:
        """Whether no alarm of this kind was raised before; from now on it was."""
        if alarm.kind in self._kinds:
            return False
        stored = set(json.loads(self._path.read_text())) if self._path.exists() else set()
        self._kinds |= stored | {alarm.kind}
        # On a full disk only this process remembers it, and a later run raises it again.
        with contextlib.suppress(OSError), replacing(self._path) as file:
            file.write(json.dumps(sorted(self._kinds)).encode())
        return alarm.kind not in stored


class AlarmWatch:
    """The alarms of one stage of a run."""

    def __init__(
        self,
        config: ExperimentConfig,
        run: Path,
        free: Callable[[Path], int] = free_bytes,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._execution = config.execution
        self._bound = (
            gap_bound(config.execution.max_logp_gap, config.rl.max_staleness, config.model.dtype) if config.rl else None
        )
        self._run = run
        self._free = free
        self._clock = clock
        self._next_s = -float("inf")
        self._metrics: NewMetrics | None = None
        self._learns_by_advantage = config.objective is not None and config.objective.learns_by_advantage
        self._rewards, self._signals = RewardHistory(), SignalHistory()
        self._raised: dict[Path, RaisedAlarms] = {}

    def look(self, stage: Path, *, at_once: bool = False) -> list[Alarm]:
        """Alarms that are new since the last call, of the stage whose directory is `stage`.

        Looks at most every ten seconds, or `at_once`. Raises OSError and ValueError for unreadable files.
        """
        if (now := self._clock()) < self._next_s and not at_once:
            return []
        self._next_s = now + _INTERVAL_S
        disk = disk_alarm(self._free(self._run), self._execution.alarms.free_gb * _GIB, str(self._run))
        found = [(stage, alarm) for alarm in self._of_metrics(stage)]
        if disk is not None:
            found.append((self._run, disk))
        return [alarm for folder, alarm in found if self._raised_in(folder).is_new(alarm)]

    def _raised_in(self, folder: Path) -> RaisedAlarms:
        return self._raised.setdefault(folder, RaisedAlarms(folder / RAISED_FILE))

    def _of_metrics(self, stage: Path) -> Iterator[Alarm]:
        if self._metrics is None:
            self._metrics = NewMetrics(stage / METRICS_FILE)
        is_other, rows = self._metrics.read()
        if is_other:
            self._rewards, self._signals = RewardHistory(), SignalHistory()
        bounds = self._execution.alarms
        for row in rows:
            self._rewards, self._signals = self._rewards.after(row), self._signals.after(row)
            silence = self._signals.alarm(bounds.no_signal_steps) if self._learns_by_advantage else None
            found = (gap_alarm(row, self._bound), self._rewards.alarm(bounds.zero_reward_steps), silence)
            yield from (alarm for alarm in found if alarm is not None)


def _row(line: bytes) -> MetricRow | None:
    """The row in `line`, null as NaN; None for a line torn by a kill."""
    try:
        return {name: math.nan if value is None else value for name, value in json.loads(line).items()}
    except ValueError:
        return None

"""The current state of all runs of a workspace, read from their files; for the live table and for Prometheus."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from luffy.cli.console import duration
from luffy.cli.progress import StageLine
from luffy.cli.run_watch import RunWatch
from luffy.pipeline.workspace import Workspace
from luffy.pipeline.workspace.records import RunCondition, list_records
from luffy.tracking.metrics import METRICS_FILE, read_last_lines

OVERVIEW_HEADER = ("run", "state", "stage", "step", "reward", "accuracy", "left", "last progress")
_RECENT_S = 24 * 3600.0
"""A run that has ended stays in the metrics for a day."""
_TAIL_BYTES = 1 << 16
_ACTIVE = ("starting", "waiting", "running")
_NAMES = {"rollout/logp_gap_mean": "logp_gap", "val/accuracy": "accuracy"}


@dataclass(frozen=True, slots=True)
class StageStatus:
    """A stage under way, or the last one of a run that has none."""

    run: str
    condition: RunCondition
    stage: str
    """Empty before the first stage."""
    step: int
    total: int
    figures: dict[str, float]
    """Known figures among `reward`, `loss`, `tokens_per_s`, `logp_gap` and `accuracy` (held-out)."""
    seconds_left: float | None
    silent_s: float | None
    """Seconds since the newest event of the stage; None before the first."""

    @property
    def cells(self) -> list[str]:
        """A row under `OVERVIEW_HEADER`."""
        return [
            self.run,
            self.condition,
            self.stage or "-",
            f"{self.step}/{self.total}" if self.total else "-",
            *(f"{self.figures[name]:.3f}" if name in self.figures else "-" for name in ("reward", "accuracy")),
            "-" if self.seconds_left is None else duration(self.seconds_left),
            "-" if self.silent_s is None else f"{duration(self.silent_s)} ago",
        ]


class WorkspaceWatch:
    """The runs `names` of a workspace, or without names all that are under way or ended within a day."""

    def __init__(self, workspace: Workspace, names: Sequence[str] = (), clock: Callable[[], float] = time.time) -> None:
        self.workspace = workspace
        self._names = names
        self._clock = clock
        self._watches: dict[str, RunWatch] = {}

    def look(self) -> list[StageStatus]:
        """Read what is new; returns a status for each stage under way, and one for each run that has none."""
        now = self._clock()
        for record in list_records(self.workspace):
            wanted = record.name in self._names if self._names else record.is_live
            if wanted and record.name not in self._watches:
                self._watches[record.name] = RunWatch(record.directory)
        ended = [name for name, watch in self._watches.items() if not watch.look() and not self._names]
        for name in ended:
            if now - (self._watches[name].last_time or 0.0) > _RECENT_S:
                del self._watches[name]
        return [status for watch in self._watches.values() for status in _statuses(watch, now)]


def is_over(statuses: Sequence[StageStatus]) -> bool:
    """Whether all of the runs have ended."""
    return all(status.condition != "running" for status in statuses)


def _statuses(watch: RunWatch, now: float) -> Iterator[StageStatus]:
    lines = list(watch.own_lines.items())
    active = [(node, line) for node, line in lines if line.state in _ACTIVE]
    begun = [(node, line) for node, line in lines if line.state != "pending"]
    for node, line in active or begun[-1:] or [("", StageLine(""))]:
        last = line.last_time or line.began
        yield StageStatus(
            watch.record.name,
            watch.record.condition,
            node,
            line.step,
            line.total,
            dict(line.metrics) | (_logged(watch, node) if node else {}),
            line.seconds_left if line.state == "running" else None,
            None if last is None else max(now - last, 0.0),
        )


def _logged(watch: RunWatch, node: str) -> dict[str, float]:
    """The newest values of `_NAMES` in the stage's metrics file."""
    if (entry := watch.record.stages.get(node)) is None:
        return {}
    found: dict[str, float] = {}
    for row in read_last_lines(entry.directory / METRICS_FILE, _TAIL_BYTES):
        for name, short in _NAMES.items():
            if isinstance(value := row.get(name), int | float):
                found[short] = float(value)
    return found

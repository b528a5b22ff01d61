"""A run followed from outside, by its record and the events of its stages: what its own terminal would show."""

import time
from collections.abc import Iterator
from pathlib import Path

from luffy.cli.console import PLAIN_INTERVAL_S, progress_words, say, stage_title, state_words
from luffy.cli.progress import StageLine, StageState
from luffy.errors import EXIT_FAILURE, EXIT_INTERRUPTED, EXIT_OK, LuffyError
from luffy.pipeline.chain.graph import build_graph
from luffy.pipeline.chain.manifest import read_manifest
from luffy.pipeline.machine.events import EVENTS_FILE, Event, EventReader
from luffy.pipeline.workspace.records import RunCondition, RunRecord, StageEntry, read_run

_OPEN: tuple[StageState, ...] = ("starting", "waiting", "running")
_REUSED = "reused"
_INTERRUPTED = "interrupted"
_EXIT_CODES: dict[RunCondition, int] = {"finished": EXIT_OK, "interrupted": EXIT_INTERRUPTED}


class RunWatch:
    """The stages of the run in `directory`, and of the arms of a comparison, as they are at the last `look`."""

    def __init__(self, directory: Path, title: str = "", left_out: frozenset[str] = frozenset()) -> None:
        self.record = read_run(directory)
        self._title = title
        self._left_out = left_out
        self._lines = {node: StageLine(self._name(node)) for node in _nodes(self.record) if node not in left_out}
        self._readers: dict[str, EventReader] = {}
        self._arms: dict[str, RunWatch] = {}

    @property
    def lines(self) -> Iterator[StageLine]:
        """The lines of all stages, those of the arms last."""
        yield from self._lines.values()
        for arm in self._arms.values():
            yield from arm.lines

    @property
    def own_lines(self) -> dict[str, StageLine]:
        """The run's own lines by node, without those of the arms."""
        return dict(self._lines)

    @property
    def last_time(self) -> float | None:
        """Time of the newest progress or end of its own stages; None if there is none."""
        times = [line.ended or line.last_time or line.began for line in self._lines.values()]
        return max((time for time in times if time is not None), default=None)

    @property
    def verdict(self) -> str:
        """How the run ended, in a line."""
        if self.record.condition == "killed":
            return f"{self.record.name}: killed (pid {self.record.pid} is gone); the same command resumes it"
        return f"{self.record.name}: {self.record.condition}"

    @property
    def exit_code(self) -> int:
        """The exit code that the run's own command would return."""
        return _EXIT_CODES.get(self.record.condition, EXIT_FAILURE)

    def look(self) -> bool:
        """Read new events; returns whether the run is still in progress."""
        # The record before the events: what a run that has ended wrote last is read, too.
        self.record = read_run(self.record.directory)
        goes_on = self.record.is_live
        for node, entry in self.record.stages.items():
            if node not in self._left_out:
                self._follow(node, entry)
        for arm, directory in self.record.arms.items():
            if arm not in self._arms:
                self._arms[arm] = RunWatch(directory, arm, frozenset(self._lines))
        for watch in self._arms.values():
            watch.look()
        if not goes_on:
            self._close()
        return goes_on

    def _follow(self, node: str, entry: StageEntry) -> None:
        line = self._lines.setdefault(node, StageLine(self._name(node)))
        if entry.action == _REUSED:
            line.state, line.note = "reused", entry.key
            return
        if line.state == "pending":
            line.state, line.note = "starting", f"{entry.action}: {entry.reason}" if entry.reason else entry.action
        reader = self._readers.setdefault(node, EventReader(entry.directory / EVENTS_FILE))
        for event in reader.read():
            if event.time >= self.record.started_s:  # older ones are of earlier attempts
                _take(line, event, entry)

    def _close(self) -> None:
        """The run has ended, even if the last events show a stage in progress."""
        for node, line in self._lines.items():
            if line.state in _OPEN:
                entry = self.record.stages.get(node)  # None: `gc` has deleted the run meanwhile
                done = entry is not None and read_manifest(entry.directory) is not None
                failed = self.record.condition == "failed"
                line.state = "finished" if done else "failed" if failed else "interrupted"
                line.ended = line.ended or line.last_time or line.began

    def _name(self, node: str) -> str:
        return stage_title(self._title, node) if self._title else node


class PlainLines:
    """Prints a line when a stage changes its state or has news, and every ten seconds in between."""

    def __init__(self, watch: RunWatch) -> None:
        self._watch = watch
        self._said: dict[str, tuple[StageState, str]] = {}
        self._last_step: dict[str, int] = {}
        self._last_time: dict[str, float] = {}

    def show(self) -> None:
        """Print what is new."""
        now = time.time()
        for line in self._watch.lines:
            is_due = now - self._last_time.get(line.name, 0.0) >= PLAIN_INTERVAL_S
            if line.state != "pending" and self._said.get(line.name) != (line.state, line.note):
                self._said[line.name] = (line.state, line.note)
                self._say(line, state_words(line), now)
            elif line.state == "running" and is_due and self._last_step.get(line.name) != line.step:
                self._say(line, progress_words(line), now)

    def _say(self, line: StageLine, words: str, now: float) -> None:
        self._last_time[line.name], self._last_step[line.name] = now, line.step
        say(f"{time.strftime('%H:%M:%S')} {line.name}: {words}")


def _nodes(record: RunRecord) -> list[str]:
    """The stages that the run will reach, as far as its configuration determines them."""
    config = record.configuration
    try:
        planned = [node.name for node in build_graph(config)] if config is not None else []
    except LuffyError:
        planned = []
    return list(dict.fromkeys([*planned, *record.stages]))


def _take(line: StageLine, event: Event, entry: StageEntry) -> None:
    if line.began is None:
        line.began = event.time
    line.take(event)
    if event.kind == "progress":
        line.state = "running"
    if event.kind == "finished":
        line.state, line.note, line.ended = "finished", entry.key, event.time
    if event.kind in ("failed", "stopped"):
        line.state = "interrupted" if event.kind == "stopped" or event.text == _INTERRUPTED else "failed"
        line.note, line.ended = event.text, event.time

"""The runs of a workspace as recorded in their `run.json`, and whether the process of each is still alive."""

import difflib
import json
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Literal

import psutil
from pydantic import ValidationError

from luffy.config import ExperimentConfig
from luffy.errors import DataError
from luffy.json_text import parse_json
from luffy.pipeline.chain.identity import Json
from luffy.pipeline.workspace import RUN_FILE, Workspace, is_discarded
from luffy.pipeline.workspace.lock import LOCK_FILE, holder_of
from luffy.pipeline.workspace.process_start import (
    is_other_container,
    is_other_machine,
    pid_namespace,
    process_start,
)

RunCondition = Literal["running", "finished", "failed", "interrupted", "killed", "unreadable"]
ARMS_FOLDER = "arms"
_STAGES_FOLDER = "stages"
_RECORDED: tuple[RunCondition, ...] = ("running", "finished", "failed", "interrupted")
_CLOCK_SLACK_S = 5.0
_SUGGESTED = 5


@dataclass(frozen=True, slots=True)
class StageEntry:
    """One stage of a run."""

    key: str
    directory: Path
    action: str
    """The run's decision: `reused`, `run`, `resume from step 20`, ..."""
    reason: str


@dataclass(frozen=True, slots=True)
class RunRecord:
    """The contents of a run's `run.json`."""

    directory: Path
    recorded: str
    """The state in the file."""
    experiment: str = ""
    pid: int | None = None
    host: str = ""
    started: str = ""
    """ISO 8601, UTC; empty if unknown."""
    updated: str = ""
    stages: Mapping[str, StageEntry] = field(default_factory=dict)
    """By node, in the order in which the run reached them."""
    config: Mapping[str, Json] = field(default_factory=dict)
    process_start: str = ""
    """`process_start` of its process; empty in records of earlier versions."""
    pid_namespace: str = ""
    """`pid_namespace` of its process; empty in records of earlier versions."""
    machine: str = ""
    """`machine` of its process; empty in records of earlier versions, and where it is unknown."""
    working_directory: str = ""
    """Where the relative paths of its configuration start; empty in records of earlier versions."""

    @property
    def name(self) -> str:
        return self.directory.name

    @property
    def started_s(self) -> float:
        """Seconds since the epoch, rounded down; 0 if unknown."""
        return datetime.fromisoformat(self.started).timestamp() if self.started else 0.0

    @property
    def is_elsewhere(self) -> bool:
        """Whether another machine or container started it, whose processes cannot be checked from here.

        An equal host name does not exclude it: virtual machines of one image, or containers, may have the same one.
        """
        if not self.host:
            return False
        has_other_name = self.host != socket.gethostname()
        return has_other_name or is_other_machine(self.machine) or is_other_container(self.pid_namespace)

    @property
    def condition(self) -> RunCondition:
        """The state as recorded, but never `running` for a run whose process is gone."""
        if self.recorded == "running" and not self._may_live():
            return "killed"
        return next((state for state in _RECORDED if state == self.recorded), "unreadable")

    @property
    def is_live(self) -> bool:
        """Whether a process works on it, or may do so on another machine."""
        return self.condition == "running"

    @property
    def configuration(self) -> ExperimentConfig | None:
        """Its configuration; None where this version cannot read it."""
        try:
            return ExperimentConfig.model_validate_json(json.dumps(self.config))
        except ValidationError:
            return None

    @property
    def arms(self) -> dict[str, Path]:
        """Directories of a comparison's runs, by `<arm>-<seed>`; empty for other runs."""
        folder = self.directory / ARMS_FOLDER
        return {link.name: link.resolve() for link in sorted(folder.iterdir())} if folder.is_dir() else {}

    def _may_live(self) -> bool:
        is_held = self._is_held()
        if is_held is not None:
            return is_held
        if self.is_elsewhere:
            return True
        # The process that makes the directory has yet to enter itself. It does so under the workspace's lock, so that
        # a deletion, which holds that lock, never has to rely on the file's age.
        if self.pid is None:
            return time.time() - _modified(self.directory / RUN_FILE) < _CLOCK_SLACK_S
        if self.process_start and (found := process_start(self.pid)):
            return found == self.process_start
        try:
            # Counted from a boot time that moves with the clock, and so used only where there is nothing better.
            began = psutil.Process(self.pid).create_time()
        except psutil.NoSuchProcess:
            return False
        except psutil.AccessDenied:
            return True
        # A process that started after the run has only reused the pid of the dead one.
        return bool(self.process_start) or not self.started or began <= self.started_s + _CLOCK_SLACK_S

    def _is_held(self) -> bool | None:
        """Whether a process holds the run's lock, in whatever container of this machine.

        None if there is none (in runs of earlier versions), and for another machine, whose locks are seen here only if
        the file system passes them on.
        """
        boot = self.pid_namespace.partition(":")[0]
        if not boot or boot != pid_namespace().partition(":")[0] or not (self.directory / LOCK_FILE).exists():
            return None
        return holder_of(self.directory) is not None


def list_records(workspace: Workspace) -> list[RunRecord]:
    """All runs, the most recently modified first."""
    files = sorted(workspace.runs.glob(f"*/{RUN_FILE}"), key=_modified, reverse=True)
    return [read_run(file.parent) for file in files if not is_discarded(file.parent)]


def read_run(directory: Path) -> RunRecord:
    """The record in `directory`; if it cannot be read, only the stages linked beside it."""
    try:
        values = parse_json((directory / RUN_FILE).read_text(encoding="utf-8"))
        return RunRecord(
            directory,
            values["state"],
            values.get("experiment", ""),
            values.get("pid"),
            values.get("host", ""),
            values.get("started", ""),
            values.get("updated", ""),
            {node: _entry(directory, node, stage) for node, stage in values.get("stages", {}).items()},
            values.get("config", {}),
            values.get("process_start", ""),
            values.get("pid_namespace", ""),
            values.get("machine", ""),
            values.get("working_directory", ""),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return RunRecord(directory, "unreadable", stages=dict(_linked(directory)))


def find_run(workspace: Workspace, text: str) -> RunRecord:
    """The run that `text` means: a path, a name in the workspace, or an experiment's name for its newest run.

    Raises DataError with similar names if there is none.
    """
    places = [workspace.runs / text]
    with suppress(RuntimeError):  # the home folder of a user who does not exist
        places.insert(0, Path(text).expanduser())
    for directory in places:
        if (directory / RUN_FILE).is_file():
            return read_run(directory.resolve())
    newest = max(workspace.run_numbers(text), default=None) if Path(text).name == text else None
    if newest is not None:
        return read_run(workspace.runs / f"{text}-{newest}")
    names = [record.name for record in list_records(workspace)]
    near = difflib.get_close_matches(text, names, n=_SUGGESTED, cutoff=0.5) or names[:_SUGGESTED]
    there = f"there are {', '.join(near)}" if near else "it has no runs"
    raise DataError(f"{text}: no such run in workspace {workspace.root}; {there} (luffy runs)")


def _entry(directory: Path, node: str, values: Mapping[str, str]) -> StageEntry:
    # The link is relative, and survives a workspace that was moved.
    link = directory / _STAGES_FOLDER / node
    where = link.resolve() if link.exists() else Path(values.get("directory", link))
    return StageEntry(values["key"], where, values.get("action", ""), values.get("reason", ""))


def _linked(directory: Path) -> Iterator[tuple[str, StageEntry]]:
    folder = directory / _STAGES_FOLDER
    for link in sorted(folder.iterdir()) if folder.is_dir() else ():
        target = link.resolve()
        yield link.name, StageEntry(target.name, target, "", "")


def _modified(file: Path) -> float:
    try:
        return file.stat().st_mtime
    except FileNotFoundError:  # given up in this moment
        return 0.0

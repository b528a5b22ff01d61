"""The runs of a workspace as recorded in their `run.json`, and whether the process of each still holds its lock."""

import difflib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

from pydantic import ValidationError

from luffy.config import ExperimentConfig
from luffy.config.removed import without_removed
from luffy.errors import DataError
from luffy.json_text import parse_json
from luffy.pipeline.identity import Json
from luffy.pipeline.lock import holder_of
from luffy.pipeline.workspace import RUN_FILE, Workspace, is_discarded

RunCondition = Literal["running", "finished", "failed", "interrupted", "killed", "unreadable"]
ARMS_FOLDER = "arms"
_STAGES_FOLDER = "stages"
_RECORDED: tuple[RunCondition, ...] = ("running", "finished", "failed", "interrupted")
_SUGGESTED = 5
_TEXTS = ("experiment", "host", "started", "updated", "working_directory")
_FIELDS: dict[str, type] = {**dict.fromkeys(_TEXTS, str), "pid": int, "config": dict}


@dataclass(frozen=True, slots=True)
class RecordedStage:
    """One stage of a run."""

    key: str
    directory: Path
    action: str
    """The run's decision: `reused`, `run`, `resume from step 20`, ..."""
    reason: str

    @property
    def kind(self) -> str:
        """The name of its kind: that of the folder in which the results of a kind lie."""
        return self.directory.parent.name


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
    stages: Mapping[str, RecordedStage] = field(default_factory=dict)
    """By node, in the order in which the run reached them."""
    config: Mapping[str, Json] = field(default_factory=dict)
    planned: tuple[str, ...] = ()
    """The results that it wants, below the stages of the workspace; empty in records of earlier versions."""
    working_directory: str = ""
    """Where the relative paths of its configuration start; empty in records of earlier versions."""

    @property
    def name(self) -> str:
        return self.directory.name

    @property
    def condition(self) -> RunCondition:
        """The state as recorded, but never `running` for a run whose process is gone: the kernel has freed its lock."""
        if self.recorded == "running" and holder_of(self.directory) is None:
            return "killed"
        return next((state for state in _RECORDED if state == self.recorded), "unreadable")

    @property
    def is_live(self) -> bool:
        return self.condition == "running"

    @property
    def kinds(self) -> dict[str, str]:
        """By node, the name of its kind."""
        return {node: entry.kind for node, entry in self.stages.items()}

    @property
    def configuration(self) -> ExperimentConfig | None:
        """Its configuration; None where this version cannot read it."""
        try:
            return ExperimentConfig.read(cast(Mapping[str, object], without_removed(dict(self.config), finished=True)))
        except ValidationError:
            return None

    @property
    def tags(self) -> frozenset[str]:
        """`tracking.tags` of its configuration."""
        found = self._tracking.get("tags")
        return frozenset(map(str, found)) if isinstance(found, list) else frozenset()

    @property
    def note(self) -> str:
        """`tracking.note` of its configuration."""
        return str(self._tracking.get("note") or "")

    @property
    def _tracking(self) -> Mapping[str, Any]:
        found = self.config.get("tracking")
        return found if isinstance(found, Mapping) else {}

    @property
    def arms(self) -> dict[str, Path]:
        """Directories of a comparison's runs, by `<arm>-<seed>`; empty for other runs."""
        folder = self.directory / ARMS_FOLDER
        return {link.name: link.resolve() for link in sorted(folder.iterdir())} if folder.is_dir() else {}


def list_records(workspace: Workspace) -> list[RunRecord]:
    """All runs, the most recently modified first."""
    files = sorted(workspace.runs.glob(f"*/{RUN_FILE}"), key=_modified, reverse=True)
    return [read_run(file.parent) for file in files if not is_discarded(file.parent)]


def read_run(directory: Path) -> RunRecord:
    """The record in `directory`; if it cannot be read or names no stages, those that are linked beside it."""
    links = directory / _STAGES_FOLDER
    targets = {link.name: link.resolve() for link in (sorted(links.iterdir()) if links.is_dir() else ())}
    linked = {node: RecordedStage(target.name, target, "", "") for node, target in targets.items()}
    stages = dict[str, RecordedStage]()
    try:
        values = parse_json((directory / RUN_FILE).read_text(encoding="utf-8"))
        for node, stage in values.get("stages", {}).items():
            # The link is relative, and survives a workspace that was moved.
            link = links / node
            where = link.resolve() if link.exists() else Path(stage.get("directory", link))
            stages[node] = RecordedStage(stage["key"], where, stage.get("action", ""), stage.get("reason", ""))
        given = {name: values[name] for name, kind in _FIELDS.items() if isinstance(values.get(name), kind)}
        found, planned = stages if "stages" in values else linked, tuple(values.get("planned", ()))
        return RunRecord(directory, values["state"], stages=found, planned=planned, **given)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return RunRecord(directory, "unreadable", stages=linked)


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
    raise DataError(f"{text}: no such run in workspace {workspace.root}; {there} (luffy show)")


def _modified(file: Path) -> float:
    try:
        return file.stat().st_mtime
    except FileNotFoundError:  # given up in this moment
        return 0.0

"""What a workspace holds, as rows of text."""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from luffy.cli.console import duration, size_words
from luffy.config import STAGE_KINDS
from luffy.pipeline.disk import measure
from luffy.pipeline.lock import holder_of
from luffy.pipeline.manifest import MANIFEST_FILE, read_manifest
from luffy.pipeline.records import RunRecord, list_records
from luffy.pipeline.reuse import newest_checkpoint
from luffy.pipeline.workspace import RUN_FILE, Workspace

RUN_HEADER = ("run", "state", "age", "size", "stages")
STAGE_HEADER = ("stage", "key", "state", "age", "size", "used by")
Rows = list[list[str]]


def take_stock(workspace: Workspace) -> tuple[Rows, Rows]:
    """Rows under `RUN_HEADER`, newest first, and under `STAGE_HEADER`, in the order of the chain.

    The size of a run is that of its directory and of its stages, which other runs may share.
    """
    records = list_records(workspace)
    directories = [(stage, directory) for stage in STAGE_KINDS for directory in workspace.siblings(stage)]
    sizes = {directory.name: measure(directory).num_bytes for _, directory in directories}
    users = _users(records)
    stages = [
        [
            stage,
            directory.name,
            stage_state(directory),
            _age(_newest(directory)),
            size_words(sizes[directory.name]),
            ", ".join(users.get(directory.name, [])) or "-",
        ]
        for stage, directory in directories
    ]
    return [_run_row(record, sizes) for record in records], stages


def stage_state(directory: Path) -> str:
    """`finished`, `running (pid 17 on host)`, `damaged (FILE)`, `interrupted (step 40)`, `gone`."""
    if not directory.is_dir():
        return "gone"
    holder = holder_of(directory)
    if holder:
        return f"running ({holder})"
    manifest = read_manifest(directory)
    if manifest is not None:
        damaged = manifest.damaged(directory)
        return f"damaged ({next(iter(damaged))})" if damaged else "finished"
    newest = newest_checkpoint(directory)
    return f"interrupted (step {newest[0]})" if newest else "interrupted"


def _run_row(record: RunRecord, sizes: Mapping[str, int]) -> list[str]:
    keys = {entry.key for entry in record.stages.values()}
    size = measure(record.directory).num_bytes + sum(sizes.get(key, 0) for key in keys)
    age = _age(record.directory / RUN_FILE)
    return [record.name, record.condition, age, size_words(size), ", ".join(record.stages)]


def _users(records: Sequence[RunRecord]) -> dict[str, list[str]]:
    """Key to the names of the runs that used it."""
    users: dict[str, list[str]] = {}
    for record in sorted(records, key=lambda record: record.name):
        for key in dict.fromkeys(entry.key for entry in record.stages.values()):
            users.setdefault(key, []).append(record.name)
    return users


def _newest(directory: Path) -> Path:
    manifest = directory / MANIFEST_FILE
    return manifest if manifest.exists() else directory


def _age(path: Path) -> str:
    return duration(max(0.0, time.time() - path.stat().st_mtime))

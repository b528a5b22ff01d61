"""What a workspace holds, as rows of text."""

import json
import socket
import time
from collections.abc import Mapping
from pathlib import Path

import psutil

from luffy.cli.console import duration
from luffy.config import STAGE_ORDER
from luffy.pipeline.checkpoints import newest_checkpoint
from luffy.pipeline.lock import holder_of
from luffy.pipeline.manifest import MANIFEST_FILE, read_manifest
from luffy.pipeline.workspace import RUN_FILE, Workspace


def list_runs(workspace: Workspace) -> list[list[str]]:
    """A row a run, newest first: name, state, age, stages it has reached."""
    files = sorted(workspace.runs.glob(f"*/{RUN_FILE}"), key=lambda file: file.stat().st_mtime, reverse=True)
    rows = []
    for file in files:
        record = _read(file)
        rows.append([file.parent.name, _run_state(record), _age(file), ", ".join(record.get("stages", {}))])
    return rows


def list_stages(workspace: Workspace) -> list[list[str]]:
    """A row a stage result, in the order of the chain: stage, key, state, age, size, runs that use it."""
    users = _users(workspace)
    rows = []
    for stage in (*STAGE_ORDER, "sweep"):
        for directory in workspace.siblings(stage):
            used_by = ", ".join(users.get(directory.name, [])) or "-"
            rows.append(
                [stage, directory.name, _stage_state(directory), _age(_newest(directory)), _size(directory), used_by]
            )
    return rows


def _read(file: Path) -> dict[str, dict[str, dict[str, str]]]:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


def _run_state(record: Mapping[str, object]) -> str:
    """The state as recorded, except that a run whose process is gone does not run."""
    state, pid = record.get("state"), record.get("pid")
    here = record.get("host") == socket.gethostname()
    if state == "running" and here and isinstance(pid, int) and not psutil.pid_exists(pid):
        return "killed"
    return str(state or "unreadable")


def _stage_state(directory: Path) -> str:
    holder = holder_of(directory)
    if holder:
        return f"running ({holder})"
    manifest = read_manifest(directory)
    if manifest is not None:
        damaged = manifest.damaged(directory)
        return f"damaged ({next(iter(damaged))})" if damaged else "finished"
    newest = newest_checkpoint(directory)
    return f"interrupted (step {newest[0]})" if newest else "interrupted"


def _users(workspace: Workspace) -> dict[str, list[str]]:
    """Key to the names of the runs that used it."""
    users: dict[str, list[str]] = {}
    for file in sorted(workspace.runs.glob(f"*/{RUN_FILE}")):
        for stage in _read(file).get("stages", {}).values():
            users.setdefault(stage["key"], []).append(file.parent.name)
    return users


def _newest(directory: Path) -> Path:
    manifest = directory / MANIFEST_FILE
    return manifest if manifest.exists() else directory


def _age(path: Path) -> str:
    return duration(max(0.0, time.time() - path.stat().st_mtime))


def _size(directory: Path) -> str:
    size = float(sum(file.stat().st_size for file in directory.rglob("*") if file.is_file() and not file.is_symlink()))
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"

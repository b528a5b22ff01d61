"""Finds the garbage in a workspace, with reasons; `luffy.pipeline.workspace.disposal` deletes it.

Everything that a run needs is kept: the stages in its record and all that these were made from, the paths in its
configuration and, while it is under way, the results that it will reuse. Links are left alone and never followed.
"""

import re
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from luffy.config.execution import CheckpointConfig
from luffy.pipeline.chain.checkpoints import CHECKPOINTS_FOLDER, complete_checkpoints
from luffy.pipeline.chain.identity import IDENTITY_FILE, KEY_LENGTH
from luffy.pipeline.chain.job import JOB_FILE
from luffy.pipeline.chain.manifest import MANIFEST_FILE, Manifest, read_manifest
from luffy.pipeline.chain.partial_writes import is_temporary, partial_writes
from luffy.pipeline.chain.reuse import LOG_FILE
from luffy.pipeline.workspace import JOBS_FOLDER, RUN_FILE, Workspace, is_discarded
from luffy.pipeline.workspace.lock import LOCK_FILE, holder_of
from luffy.pipeline.workspace.needs import Needs, find_needs, stage_directories
from luffy.pipeline.workspace.records import RunRecord, list_records
from luffy.pipeline.workspace.retention import Retention

Kind = Literal["run", "result", "checkpoint", "part", "log"]
_KEY = re.compile(f"[0-9a-f]{{{KEY_LENGTH}}}")
_BEGINNING_S = 60.0
"""A directory of a run that is older than this and has no record is garbage: runs write their record sooner.

After a jump of the clock a listing may be wrong about a new run, but a deletion may not: a run begins under the
workspace's lock, which a deletion holds exclusively (`luffy.pipeline.workspace.claims`).
"""
_PROBE = ".probe-*"
_INCOMING = "incoming_"
_OLD_LOG_S = 30 * 86400.0


@dataclass(frozen=True, slots=True)
class Garbage:
    """One entry of a workspace that can be deleted."""

    kind: Kind
    path: Path
    reason: str
    modified: float
    """Seconds since the epoch."""
    stage: Path | None = None
    """The stage directory whose lock guards it."""

    @property
    def age_s(self) -> float:
        return max(0.0, time.time() - self.modified)


@dataclass(frozen=True, slots=True)
class Survey:
    """What can be deleted, in order, and notes on what was kept although nothing seems to need it."""

    garbage: tuple[Garbage, ...]
    notes: tuple[str, ...]


def survey(workspace: Workspace, retention: Retention) -> Survey:
    """Find all garbage. Raises DataError when `retention` names a run that does not exist, or that is under way."""
    records = list_records(workspace)
    given_up = retention.given_up(records)
    kept = [record for record in records if record not in given_up]
    needs = find_needs(workspace, kept)
    given_up = [record for record in given_up if record.directory not in needs.runs]
    notes = list(needs.notes)
    former = {entry.directory: record.name for record in reversed(given_up) for entry in record.stages.values()}
    garbage = [_run(record) for record in given_up if _own(record.directory, notes)]
    for directory in stage_directories(workspace):
        if _own(directory, notes):
            garbage += _of_stage(directory, needs, former, retention, notes)
    garbage += _leftovers(workspace)
    garbage += _begun_runs(workspace, {record.directory: record for record in records})
    if not any(record.is_live for record in kept):
        garbage += _old_log(workspace.warm_log, None)
    return Survey(tuple(garbage), tuple(notes))


def _run(record: RunRecord) -> Garbage:
    return Garbage("run", record.directory, f"{record.condition}, given up", _modified(record.directory / RUN_FILE))


def _of_stage(
    directory: Path, needs: Needs, former: Mapping[Path, str], retention: Retention, notes: list[str]
) -> Iterator[Garbage]:
    holder = holder_of(directory)
    if holder is not None:
        notes.append(f"{_title(directory)}: in use by {holder}")
        return
    manifest = read_manifest(directory)
    if directory not in needs.stages:
        if needs.are_known:
            yield Garbage("result", directory, _why_unused(directory, manifest, former), _age_of(directory), directory)
        return
    if directory in needs.live:
        return
    yield from partial_files(directory)
    if manifest is not None:
        for folder in (directory / name for name in manifest.scratch):
            if folder.is_dir():
                yield Garbage("part", folder, "needed only until the stage was finished", _modified(folder), directory)
        yield from _superseded(directory, manifest, needs, retention)
        yield from _old_log(directory / LOG_FILE, directory)


def _why_unused(directory: Path, manifest: Manifest | None, former: Mapping[Path, str]) -> str:
    unused = f"only {former[directory]} used it" if directory in former else "no run uses it"
    if manifest is not None:
        return unused
    newest = max(complete_checkpoints(directory), default=None)
    return f"not finished{f' (step {newest})' if newest is not None else ''}, {unused}"


def _superseded(directory: Path, manifest: Manifest, needs: Needs, retention: Retention) -> Iterator[Garbage]:
    """Checkpoints before the newest one; a longer run, or the repair of a damaged model, needs only the newest."""
    more_kept = manifest.execution.checkpoint.keep > CheckpointConfig().keep
    if directory in needs.checkpoints or (more_kept and not retention.all_checkpoints):
        return
    checkpoints = sorted(complete_checkpoints(directory).items())
    for _, folder in checkpoints[:-1]:
        reason = f"the stage is finished, and its checkpoint of step {checkpoints[-1][0]} stays"
        yield Garbage("checkpoint", folder, reason, _modified(folder), directory)


def partial_files(directory: Path) -> Iterator[Garbage]:
    """Partial files that a killed process has left in a stage."""
    complete = set(complete_checkpoints(directory).values())
    folder = directory / CHECKPOINTS_FOLDER
    for path in sorted(folder.iterdir()) if folder.is_dir() and not folder.is_symlink() else ():
        if path not in complete and (path.name.startswith(("step_", _INCOMING)) or is_discarded(path)):
            yield Garbage("part", path, "a checkpoint that is not complete", _modified(path), directory)
    for path in partial_writes(directory):
        reason = "an interrupted deletion" if is_discarded(path) else "a file that was being written"
        yield Garbage("part", path, reason, _modified(path), directory)


def _leftovers(workspace: Workspace) -> Iterator[Garbage]:
    """Partial files that a killed process has left beside stages and runs."""
    folders = [workspace.runs, *(folder for folder in _entries(workspace.stages) if folder.is_dir())]
    for folder in folders:
        for path in _entries(folder):
            if is_discarded(path):
                yield Garbage("part", path, "an interrupted deletion", _modified(path))
    for path in [*workspace.root.glob(_PROBE), *_temporaries(workspace.root)]:
        yield Garbage("part", path, "a file that was being written", _modified(path))


def _begun_runs(workspace: Workspace, records: Mapping[Path, RunRecord]) -> Iterator[Garbage]:
    """Partial files of runs that were killed, and runs that were killed before they had written a record."""
    for directory in _entries(workspace.runs):
        if is_discarded(directory) or not directory.is_dir() or directory.is_symlink():
            continue
        record = records.get(directory)
        if record is None:
            is_old = time.time() - _modified(directory) > _BEGINNING_S
            if is_old and all(map(is_temporary, directory.iterdir())):
                yield Garbage("run", directory, "killed before it began", _modified(directory))
        elif not record.is_live:
            for folder in (directory, directory / "stages", directory / JOBS_FOLDER):
                for path in _temporaries(folder):
                    yield Garbage("part", path, "a file that was being written", _modified(path))


def _old_log(path: Path, stage: Path | None) -> Iterator[Garbage]:
    if path.is_file() and not path.is_symlink() and time.time() - _modified(path) > _OLD_LOG_S:
        yield Garbage("log", path, f"older than {_OLD_LOG_S / 86400:.0f} days", _modified(path), stage)


def _temporaries(folder: Path) -> Iterable[Path]:
    """Temporary files of `luffy.files.replacing`, and temporary links of runs."""
    found = filter(is_temporary, _entries(folder))
    return (path for path in found if path.is_symlink() or path.is_file())


def _entries(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() and not folder.is_symlink() else []


def _own(directory: Path, notes: list[str]) -> bool:
    """Whether `directory` is really in the workspace, not behind a link, and was made by the pipeline."""
    if directory.resolve() != directory:
        notes.append(f"{_title(directory)}: is a link, or below one; left alone")
        return False
    known = (directory / name for name in (RUN_FILE, JOB_FILE, IDENTITY_FILE, MANIFEST_FILE))
    if not any(file.is_file() for file in known) and not (_KEY.fullmatch(directory.name) and _is_empty(directory)):
        notes.append(f"{_title(directory)}: is no stage's result; left alone")
        return False
    return True


def _is_empty(directory: Path) -> bool:
    return not any(path.name != LOCK_FILE for path in directory.iterdir())


def _title(directory: Path) -> str:
    return f"{directory.parent.name}/{directory.name}"


def _age_of(directory: Path) -> float:
    """When it was finished, or last begun."""
    files = (directory / name for name in (MANIFEST_FILE, IDENTITY_FILE))
    return _modified(next((file for file in files if file.exists()), directory))


def _modified(path: Path) -> float:
    try:
        return path.lstat().st_mtime
    except FileNotFoundError:  # gone in this moment
        return time.time()

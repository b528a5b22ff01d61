"""Finds the garbage in a workspace, with reasons, and deletes it.

Everything that a run needs is kept: the stages in its record and all that these were made from, the paths in its
configuration and, while it is under way, the results that it has planned. Links are left alone and never followed.

A deletion surveys again under the workspace's lock, renames, then deletes. A kill at any moment leaves entries that are
not yet renamed unchanged, and the others under a name that is never read and that the next deletion removes. A stage
that a process works on is never touched, since its lock is taken first.
"""

import os
import re
import time
import uuid
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path

from luffy.errors import DataError, LuffyError
from luffy.files import sync_directory
from luffy.pipeline.identity import IDENTITY_FILE, KEY_LENGTH, Json, read_identity
from luffy.pipeline.job import JOB_FILE, in_workspace_of, read_job
from luffy.pipeline.lock import LOCK_FILE, holder_of, lock_if_free
from luffy.pipeline.manifest import MANIFEST_FILE, read_manifest
from luffy.pipeline.records import RunRecord, list_records
from luffy.pipeline.reuse import CHECKPOINTS_FOLDER, complete_checkpoints, delete, is_temporary, partial_writes
from luffy.pipeline.workspace import JOBS_FOLDER, RUN_FILE, TRASH_PREFIX, Workspace, claiming, is_discarded

_KEY = re.compile(f"[0-9a-f]{{{KEY_LENGTH}}}")
_BEGINNING_S = 60.0
"""A directory of a run that is older than this and has no record is garbage: runs write their record sooner.

After a jump of the clock a listing may be wrong about a new run, but a deletion may not: a run begins under the
workspace's lock, which a deletion holds exclusively (`luffy.pipeline.workspace`).
"""
_INCOMING = "incoming_"


@dataclass(frozen=True, slots=True)
class Retention:
    """Rules for keeping runs; by default all are kept."""

    keep_runs: int | None = None
    """Number of newest runs to keep of each experiment."""
    names: tuple[str, ...] = ()
    """Runs to delete, however new they are."""

    def given_up(self, records: Sequence[RunRecord]) -> list[RunRecord]:
        """The runs among `records` (newest first) to discard.

        The arms of a comparison are kept or discarded together with it. A run whose record cannot be read is discarded
        only by name, and a run that is under way not at all.

        Raises DataError for a name without a run, and for one of a run that is under way.
        """
        by_name, named = {record.name: record for record in records}, set[Path]()
        for name in self.names:
            if name not in by_name:
                raise DataError(f"--runs {name}: no such run; luffy show lists them")
            record = by_name[name]
            if record.is_live:
                raise DataError(f"--runs {name}: is under way (pid {record.pid} on {record.host}); end it first")
            arms = {*record.arms.values()}
            named |= {
                record.directory,
                *(arm.directory for arm in records if arm.directory in arms and not arm.is_live),
            }
        # A comparison that is under way may reuse what its arms made before.
        comparing = tuple(f"{record.experiment}." for record in records if record.is_live and record.experiment)
        num_newer, going = Counter[str](), set(named)
        by_age = sorted(records, key=lambda record: record.started, reverse=True) if self.keep_runs is not None else ()
        for record in by_age:
            newer = num_newer[record.experiment]
            num_newer[record.experiment] += 1
            # Nothing else of a record that cannot be read is used, since it may be anything.
            if record.condition in ("running", "unreadable") or record.experiment.startswith(comparing):
                continue
            if newer >= (self.keep_runs or 0):
                going.add(record.directory)
        kept = [record for record in records if record.directory not in going]
        going -= {arm for record in kept for arm in record.arms.values()} - named
        return [record for record in records if record.directory in going]


@dataclass(frozen=True, slots=True)
class Garbage:
    """One entry of a workspace that can be deleted."""

    path: Path
    reason: str
    stage: Path | None = None
    """The stage directory whose lock guards it."""


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
    needs = _find_needs(workspace, kept)
    given_up = [record for record in given_up if record.directory not in needs.runs]
    notes = list(needs.notes)
    former = {entry.directory: record.name for record in reversed(given_up) for entry in record.stages.values()}
    garbage = [
        Garbage(record.directory, f"{record.condition}, given up")
        for record in given_up
        if _own(record.directory, notes)
    ]
    for directory in _stage_directories(workspace):
        if _own(directory, notes):
            garbage += _of_stage(directory, needs, former, notes)
    garbage += _leftovers(workspace, {record.directory: record for record in records})
    return Survey(tuple(garbage), tuple(notes))


def dispose(workspace: Workspace, retention: Retention, chosen: Iterable[Garbage]) -> list[tuple[Garbage, str]]:
    """Delete those of `chosen` that are still garbage; returns the others, each with the reason why it is there.

    Raises what `survey` raises.
    """
    missing, spared = {item.path: item for item in chosen}, list[tuple[Garbage, str]]()
    with claiming(workspace, exclusive=True):
        now = [item for item in survey(workspace, retention).garbage if missing.pop(item.path, None) is not None]
        results = [(item, _discard(item)) for item in now]
    for item, left in results:
        if isinstance(left, str):
            spared.append((item, left))
            continue
        delete(left, ignore_errors=True)
        if left.exists() or left.is_symlink():
            spared.append((item, f"{left} could not be deleted"))
    return spared + [(item, "needed by now, or gone") for item in missing.values()]


def _discard(item: Garbage) -> Path | str:
    """Rename a folder, or delete a file; returns the path that is left to delete, or the reason why the item stays."""
    path = item.path
    try:
        with lock_if_free(item.stage) if item.stage is not None else nullcontext(True) as is_ours:
            if not is_ours:
                return "a process has just begun to work on it"
            if path.is_symlink() or not path.is_dir():
                path.unlink(missing_ok=True)  # a kill cannot leave half of it
                return path
            if is_discarded(path):
                return path
            place = path.with_name(f"{TRASH_PREFIX}{path.name[:200]}-{uuid.uuid4().hex}")
            path.rename(place)
            # Runs go before their stages, and must stay so if the power fails.
            sync_directory(path.parent)
            return place
    except OSError as error:
        return error.strerror or str(error)


@dataclass(frozen=True, slots=True)
class _Needs:
    stages: set[Path]
    runs: set[Path]
    live: set[Path]
    """Stages of runs that are under way: nothing in them is touched."""
    notes: list[str]
    """Reasons why it could not be determined which results the runs under way will reuse."""


def _find_needs(workspace: Workspace, kept: Sequence[RunRecord]) -> _Needs:
    """The needs of the runs `kept`, and the stages that are being made now."""
    by_key = {directory.name: directory for directory in _stage_directories(workspace)}

    def add_with_sources(found: set[Path], roots: Iterable[Path]) -> None:
        """Stage directories, and those that they were made from."""
        for directory in roots:
            if directory not in found:
                found.add(directory)
                record = read_identity(directory)
                keys = record.identity.upstream.values() if record is not None else ()
                add_with_sources(found, [by_key[key] for key in keys if key in by_key])

    needs = _Needs(set(), set(), set(), [])
    begun = {directory for directory in by_key.values() if holder_of(directory) is not None}
    live, named = set[Path](), set[Path]()
    for record in kept:
        used = {entry.directory for entry in record.stages.values()}
        begun |= used
        if record.is_live:
            live |= used | {workspace.stages / place for place in record.planned}
        if record.is_live and record.config and not record.planned:
            needs.notes.append(f"{record.name} is under way, begun by another version: no result is deleted")
        elif record.condition == "unreadable" and holder_of(record.directory) is not None:
            needs.notes.append(f"{record.name} is under way, and its record cannot be read: no result is deleted")
        needs.runs.update(record.arms.values())
        named.update(_named_paths(record.config, record.working_directory, workspace))
    roots = begun | live
    for path in named:
        for folder, depth, found in ((workspace.runs, 1, needs.runs), (workspace.stages, 2, roots)):
            parts = path.relative_to(folder).parts if path.is_relative_to(folder) else ()
            if len(parts) >= depth:  # it is an entry of the folder, or lies in one
                found.add(folder.joinpath(*parts[:depth]))
    for directory in begun:
        if (directory / MANIFEST_FILE).exists() or not (directory / JOB_FILE).is_file():
            continue
        with suppress(LuffyError):  # from another version; this one would make the stage from scratch
            if extends := read_job(directory / JOB_FILE).extends:
                roots.add(in_workspace_of(directory, extends))
    add_with_sources(needs.live, live)
    add_with_sources(needs.stages, roots)
    return needs


def _stage_directories(workspace: Workspace) -> Iterator[Path]:
    for folder in sorted(workspace.stages.iterdir()) if workspace.stages.is_dir() else ():
        if folder.is_dir() and not is_discarded(folder):
            yield from workspace.siblings(folder.name)


def _named_paths(values: Json | Mapping[str, Json], start: str, workspace: Workspace) -> Iterator[Path]:
    """The paths in the workspace that texts of a configuration name; relative ones begin at `start`."""
    if isinstance(values, Mapping | list):
        for below in values.values() if isinstance(values, Mapping) else values:
            yield from _named_paths(below, start, workspace)
    elif isinstance(values, str) and os.sep in values and "\0" not in values:
        try:
            path = Path.cwd() / start / Path(values).expanduser()
            # Both the given path, perhaps a link in a run's directory, and its target.
            places = {path, path.resolve()}
        except RuntimeError:  # a circle of links, or text that looks like the home of nobody (`~~~md/x`)
            return
        yield from (place for place in places if place.is_relative_to(workspace.root))


def _of_stage(directory: Path, needs: _Needs, former: Mapping[Path, str], notes: list[str]) -> Iterator[Garbage]:
    holder = holder_of(directory)
    if holder is not None:
        notes.append(f"{_title(directory)}: in use by {holder}")
        return
    manifest = read_manifest(directory)
    if directory not in needs.stages:
        if not needs.notes:
            reason = f"only {former[directory]} used it" if directory in former else "no run uses it"
            if manifest is None:
                newest = max(complete_checkpoints(directory), default=None)
                reason = f"not finished{f' (step {newest})' if newest is not None else ''}, {reason}"
            yield Garbage(directory, reason, directory)
        return
    if directory in needs.live:
        return
    yield from partial_files(directory)
    for folder in (directory / name for name in (() if manifest is None else manifest.scratch)):
        if folder.is_dir():
            yield Garbage(folder, "needed only until the stage was finished", directory)


def partial_files(directory: Path) -> Iterator[Garbage]:
    """Partial files that a killed process has left in a stage."""
    complete = set(complete_checkpoints(directory).values())
    for path in _entries(directory / CHECKPOINTS_FOLDER):
        if path not in complete and (path.name.startswith(("step_", _INCOMING)) or is_discarded(path)):
            yield Garbage(path, "a checkpoint that is not complete", directory)
    for path in partial_writes(directory):
        reason = "an interrupted deletion" if is_discarded(path) else "a file that was being written"
        yield Garbage(path, reason, directory)


def _leftovers(workspace: Workspace, records: Mapping[Path, RunRecord]) -> Iterator[Garbage]:
    """Partial files that a killed process has left beside stages and in runs, and runs without a record."""
    for folder in [workspace.runs, *_entries(workspace.stages)]:
        for path in filter(is_discarded, _entries(folder)):
            yield Garbage(path, "an interrupted deletion")
    folders = [workspace.root]
    for directory in _entries(workspace.runs):
        if is_discarded(directory) or not directory.is_dir() or directory.is_symlink():
            continue
        record, is_old = records.get(directory), time.time() - directory.stat().st_mtime > _BEGINNING_S
        if record is not None and not record.is_live:
            folders += [directory, directory / "stages", directory / JOBS_FOLDER]
        elif record is None and is_old and all(map(is_temporary, directory.iterdir())):
            yield Garbage(directory, "killed before it began")
    # By `luffy.files.replacing`, and links of runs.
    written = (path for folder in folders for path in filter(is_temporary, _entries(folder)))
    for path in (path for path in written if path.is_symlink() or path.is_file()):
        yield Garbage(path, "a file that was being written")


def _entries(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() and not folder.is_symlink() else []


def _own(directory: Path, notes: list[str]) -> bool:
    """Whether `directory` is really in the workspace, not behind a link, and was made by the pipeline."""
    if directory.resolve() != directory:
        notes.append(f"{_title(directory)}: is a link, or below one; left alone")
        return False
    known = (directory / name for name in (RUN_FILE, JOB_FILE, IDENTITY_FILE, MANIFEST_FILE))
    is_empty = all(path.name == LOCK_FILE for path in directory.iterdir())
    if not any(file.is_file() for file in known) and not (_KEY.fullmatch(directory.name) and is_empty):
        notes.append(f"{_title(directory)}: is no stage's result; left alone")
        return False
    return True


def _title(directory: Path) -> str:
    return f"{directory.parent.name}/{directory.name}"

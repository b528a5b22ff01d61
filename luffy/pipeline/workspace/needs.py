"""What the runs of a workspace need: their stages, the stages these were made from, and paths in their settings."""

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from luffy.config import ExperimentConfig
from luffy.errors import LuffyError
from luffy.pipeline.chain.identity import Json, read_identity
from luffy.pipeline.chain.job import JOB_FILE, StageJob, in_workspace_of, inputs_of, read_job
from luffy.pipeline.chain.manifest import MANIFEST_FILE
from luffy.pipeline.experiment import open_experiment
from luffy.pipeline.workspace import Workspace, is_discarded
from luffy.pipeline.workspace.lock import holder_of
from luffy.pipeline.workspace.records import RunRecord


@dataclass(frozen=True, slots=True)
class Needs:
    """Directories that must be kept."""

    stages: frozenset[Path]
    """Stage directories."""
    runs: frozenset[Path]
    """Run directories."""
    live: frozenset[Path]
    """Stage directories of runs that are under way: nothing in them is touched."""
    checkpoints: frozenset[Path]
    """Stage directories whose checkpoints an unfinished stage has yet to read."""
    are_known: bool
    """False if it could not be determined which results the runs under way will reuse."""
    notes: tuple[str, ...]


def find_needs(workspace: Workspace, kept: Sequence[RunRecord]) -> Needs:
    """The needs of the runs `kept`, and the stages that are being made now."""
    by_key = {directory.name: directory for directory in stage_directories(workspace)}
    notes, planned = [], set[Path]()
    for record in kept:
        if record.is_live:
            try:
                planned |= _planned(workspace, record)
            except (LuffyError, ValidationError) as error:
                reason = str(error).partition("\n")[0]
                notes.append(
                    f"{record.name} is under way, and what it will reuse is not known ({reason}): no result is deleted"
                )
        elif record.condition == "unreadable" and holder_of(record.directory) is not None:
            notes.append(f"{record.name} is under way, and its record cannot be read: no result is deleted")
    live = planned | {entry.directory for record in kept if record.is_live for entry in record.stages.values()}
    used = {entry.directory for record in kept for entry in record.stages.values()}
    held = {directory for directory in by_key.values() if holder_of(directory) is not None}
    named = {path for record in kept for path in _named_paths(record.config, record.working_directory, workspace)}
    unfinished = {path: job for path in used | held if (job := _unfinished(path)) is not None}
    roots = used | held | live | {_child_of(workspace.stages, path, 2) for path in named}
    roots |= {in_workspace_of(path, job.extends) for path, job in unfinished.items() if job.extends}
    inputs = {source for path, job in unfinished.items() for source in inputs_of(job, path).values()}
    return Needs(
        frozenset(_with_sources(roots, by_key)),
        frozenset(filter(None, (_child_of(workspace.runs, path, 1) for path in named)))
        | {arm for record in kept for arm in record.arms.values()},
        frozenset(_with_sources(live, by_key)),
        frozenset(inputs),
        not notes,
        tuple(notes),
    )


def stage_directories(workspace: Workspace) -> Iterator[Path]:
    """The directories of results of all stages."""
    for folder in sorted(workspace.stages.iterdir()) if workspace.stages.is_dir() else ():
        for directory in sorted(folder.iterdir()) if folder.is_dir() and not is_discarded(folder) else ():
            if directory.is_dir() and not is_discarded(directory):
                yield directory


def _planned(workspace: Workspace, record: RunRecord) -> set[Path]:
    """The results that a run will use, as far as its current configuration determines them."""
    if not record.config:
        return set()  # it has not entered anything yet
    config = ExperimentConfig.model_validate_json(json.dumps(record.config))
    identities = open_experiment(config, workspace).identities.values()
    return {workspace.stage_directory(identity.stage, identity.key) for identity in identities}


def _with_sources(roots: Iterable[Path | None], by_key: Mapping[str, Path]) -> set[Path]:
    """Stage directories, and those that they were made from."""
    waiting, found = [root for root in roots if root is not None], set[Path]()
    while waiting:
        directory = waiting.pop()
        if directory not in found:
            found.add(directory)
            record = read_identity(directory)
            keys = record.identity.upstream.values() if record is not None else ()
            waiting.extend(by_key[key] for key in keys if key in by_key)
    return found


def _unfinished(directory: Path) -> StageJob | None:
    """The job of a stage that is not finished; None for a finished one."""
    if (directory / MANIFEST_FILE).exists() or not (directory / JOB_FILE).is_file():
        return None
    try:
        return read_job(directory / JOB_FILE)
    except LuffyError:
        return None  # from another version; this one would make the stage from scratch


def _named_paths(values: Json | Mapping[str, Json], start: str, workspace: Workspace) -> Iterator[Path]:
    """The paths in the workspace that texts of a configuration name; relative ones begin at `start`."""
    if isinstance(values, Mapping):
        for below in values.values():
            yield from _named_paths(below, start, workspace)
    elif isinstance(values, list):
        for below in values:
            yield from _named_paths(below, start, workspace)
    elif isinstance(values, str) and os.sep in values and "\0" not in values:
        try:
            path = Path.cwd() / start / Path(values).expanduser()
            # Both the given path, perhaps a link in a run's directory, and its target.
            places = {path, path.resolve()}
        except RuntimeError:  # a circle of links, or text that looks like the home of nobody (`~~~md/x`)
            return
        yield from (place for place in places if place.is_relative_to(workspace.root))


def _child_of(folder: Path, path: Path, depth: int) -> Path | None:
    """The entry `depth` levels below `folder` that `path` is or lies in."""
    if not path.is_relative_to(folder):
        return None
    parts = path.relative_to(folder).parts
    return folder.joinpath(*parts[:depth]) if len(parts) >= depth else None

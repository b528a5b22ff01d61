"""Deletes garbage: surveys it again under the workspace's lock, renames it, then deletes it. Single files are deleted
at once.

A kill at any moment leaves entries that are not yet renamed unchanged, and the others under a name that is never read
and that the next deletion removes. A stage that a process works on is never touched, since its lock is taken first.
"""

import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from luffy.files import sync_directory
from luffy.pipeline.workspace import TRASH_PREFIX, Workspace, is_discarded
from luffy.pipeline.workspace.claims import disposing
from luffy.pipeline.workspace.garbage import Garbage, survey
from luffy.pipeline.workspace.lock import lock_if_free
from luffy.pipeline.workspace.retention import Retention


@dataclass(frozen=True, slots=True)
class Disposal:
    """Outcome of a deletion."""

    gone: tuple[Garbage, ...]
    spared: tuple[tuple[Garbage, str], ...]
    """Garbage that was not deleted, each item with the reason."""


def dispose(
    workspace: Workspace,
    retention: Retention,
    chosen: Iterable[Garbage],
    deleted: Callable[[Garbage], None] = lambda item: None,
) -> Disposal:
    """Delete those of `chosen` that are still garbage; calls `deleted` for each. Raises what `survey` raises."""
    paths = {item.path for item in chosen}
    with disposing(workspace):
        now = [item for item in survey(workspace, retention).garbage if item.path in paths]
        results = [(item, _discard(item)) for item in now]
    renamed = [(item, place) for item, place in results if isinstance(place, Path)]
    spared = [(item, reason) for item, reason in results if isinstance(reason, str)]
    gone = []
    for item, place in renamed:
        _delete(place)
        if place.exists() or place.is_symlink():
            spared.append((item, f"{place} could not be deleted"))
        else:
            gone.append(item)
            deleted(item)
    missing = paths - {item.path for item in now}
    spared += [(item, "needed by now, or gone") for item in chosen if item.path in missing]
    return Disposal(tuple(gone), tuple(spared))


def _discard(item: Garbage) -> Path | str:
    """Rename a folder, or delete a file; returns the path that is left to delete, or the reason why the item stays."""
    try:
        if item.stage is None:
            return _put_away(item.path)
        with lock_if_free(item.stage) as is_ours:
            return _put_away(item.path) if is_ours else "a process has just begun to work on it"
    except OSError as error:
        return error.strerror or str(error)


def _put_away(path: Path) -> Path:
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)  # a kill cannot leave half of it
        return path
    if is_discarded(path):
        return path
    number, place = 0, path.with_name(f"{TRASH_PREFIX}{path.name}")
    while place.exists() or place.is_symlink():
        number += 1
        place = path.with_name(f"{TRASH_PREFIX}{path.name}-{number}")
    path.rename(place)
    # Runs go before their stages, and must stay so if the power fails.
    sync_directory(path.parent)
    return place


def _delete(path: Path) -> None:
    """Delete `path` without following links; continues after a file that cannot be deleted."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)

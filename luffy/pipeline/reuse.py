"""Whether a stage's directory holds its finished result, and what to clear if it does not; its checkpoints.

The rules, in the order in which they apply:

1. The manifest exists, its outputs are intact, and the inputs still have the digests that were consumed: reused.
2. The inputs have changed since: nothing in the directory can be trusted; the stage starts from scratch.
3. Only exported model files are damaged: the files of the training itself (checkpoints, journal, metrics) are intact,
   so the export is cleared and the stage resumes from its newest checkpoint.
4. Anything else is damaged: the stage starts from scratch.
5. No manifest: the stage was interrupted and resumes from its newest checkpoint.
"""

import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict, model_validator

from luffy.config import STAGE_KINDS
from luffy.errors import LuffyError
from luffy.pipeline.events import EVENTS_FILE
from luffy.pipeline.identity import IDENTITY_FILE, Identity, IdentityRecord, Json, read_identity, write_identity
from luffy.pipeline.job import JOB_FILE, StageJob, write_job
from luffy.pipeline.lock import LOCK_FILE
from luffy.pipeline.manifest import (
    MANIFEST_FILE,
    Manifest,
    consumed_digests,
    finished_manifest,
    read_manifest,
    write_manifest,
)
from luffy.pipeline.workspace import TRASH_PREFIX, find_workspace, is_discarded

LOG_FILE = "log.txt"
RECORD_FILE = "record.json"
"""Prefect's record of a finished stage. A torn or stale one is a miss, and costs a look at the manifest."""
PAID_ANSWERS = "paid_answers.jsonl"
"""File of paid answers. The key of each covers the whole question, so answers stay valid after any change."""
_EXPORT_FOLDER = "model"
_NEVER_CHANGED = (".safetensors", ".parquet", ".pt", ".zst")
_KEPT = frozenset({JOB_FILE, EVENTS_FILE, LOG_FILE, LOCK_FILE, PAID_ANSWERS})
CHECKPOINTS_FOLDER = "checkpoints"
"""Where training stages keep their checkpoints: `checkpoints/step_000040/`, complete once it holds `COMPLETE`."""
COMPLETE_FILE = "COMPLETE"
_STEP = re.compile(r"step_(\d+)")
_TEMPORARY = re.compile(r"\..+\.([a-z0-9_]{8}|\d+-\d+)|\.tmp[A-Za-z0-9]{6}")


@dataclass(frozen=True, slots=True)
class Condition:
    """Whether a stage's directory can be reused, or resumed."""

    reusable: bool
    reason: str = ""
    """Why it cannot be reused; empty when it can, or when it was never finished."""
    stale: tuple[str, ...] = ()
    """Entries of the directory to be removed before the stage runs again."""
    step: int = 0
    """The checkpoint that would be resumed; 0: from the beginning."""

    @property
    def from_scratch(self) -> bool:
        """Whether all work of earlier attempts is removed."""
        return bool(self.stale) and not self.step


def examine(directory: Path, key: str, consumed: Mapping[str, str], *, verify: bool = False) -> Condition:
    """The condition of `directory` for the stage `key` whose inputs now have the digests `consumed`."""
    if os.path.lexists(directory) and not directory.is_dir():
        return Condition(False, "a file or a broken link is in the place of its folder")
    manifest = read_manifest(directory)
    record = manifest or read_identity(directory)
    if record is None and os.path.lexists(directory / IDENTITY_FILE):
        return Condition(False, f"{IDENTITY_FILE} is not readable", _all_entries(directory))
    if record is None and os.path.lexists(directory / MANIFEST_FILE):
        return Condition(False, f"{MANIFEST_FILE} is not readable", (MANIFEST_FILE,))
    if record is None:
        return Condition(False)  # not a stage: it keeps all its files
    if record.key != key:
        return Condition(False, f"the directory holds {record.key}", _all_entries(directory))
    changed = [name for name in sorted(consumed) if record.consumed.get(name) != consumed[name]]
    if changed:
        return Condition(False, f"{', '.join(changed)} came out differently", _all_entries(directory))
    if manifest is None:
        if os.path.lexists(directory / MANIFEST_FILE):
            return Condition(False, f"{MANIFEST_FILE} is not readable", _all_entries(directory))
        newest = newest_checkpoint(directory)
        return Condition(False, step=newest[0] if newest else 0)
    damaged = manifest.damaged(directory, verify=verify)
    if not damaged:
        return Condition(True)
    (path, complaint), *others = damaged.items()
    reason = f"{path} is {complaint}{f' (and {len(others)} more)' if others else ''}"
    if all(path.startswith(f"{_EXPORT_FOLDER}/") for path in damaged) and (newest := newest_checkpoint(directory)):
        return Condition(False, reason, (MANIFEST_FILE, _EXPORT_FOLDER), newest[0])
    return Condition(False, reason, _all_entries(directory))


class FinishedStage(BaseModel):
    """Where a finished stage is: the record that Prefect keeps of it, beside its manifest.

    Loading it raises ValueError where the result is not there whole, made from the inputs as they are now: Prefect then
    makes the stage again. Its place is relative, below the stages of the workspace in LUFFY_WORKSPACE.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    stage: str
    key: str
    inputs: dict[str, str]
    """Input name to the place of the stage that it was made from, such as `sft/0f3a…`."""
    digest: str
    """Hash over all outputs."""

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        stages = find_workspace().stages
        try:
            consumed = consumed_digests({name: stages / place for name, place in self.inputs.items()})
        except LuffyError as error:  # an input is gone
            raise ValueError(str(error)) from None
        condition = examine(self.directory, self.key, consumed)
        if not condition.reusable or finished_manifest(self.directory).digest != self.digest:
            raise ValueError(f"{self.directory}: {condition.reason or 'not the result that was recorded'}")
        return self

    @property
    def directory(self) -> Path:
        return find_workspace().stage_directory(self.stage, self.key)


def afresh(directory: Path) -> Condition:
    """The condition of `directory` for a stage that is to be made again, whatever is there."""
    return Condition(False, "asked for", _all_entries(directory))


def adoptable(directory: Path, record: IdentityRecord, siblings: Iterable[Path]) -> tuple[Path, Manifest] | None:
    """The newest of `siblings` that differs from `record` in its code alone and has the pages of this code; None if
    there is none, or if `directory` has begun."""
    if directory.exists():
        return None
    wanted, pages, found = _without_code(record.identity), STAGE_KINDS[record.identity.stage].pages, []
    for sibling in siblings:
        theirs, manifest = read_identity(sibling), read_manifest(sibling)
        if theirs is None or manifest is None or manifest.consumed != record.consumed:
            continue
        if not {output.path for output in manifest.outputs}.issuperset(pages):
            continue
        if _without_code(theirs.identity) == wanted and not manifest.damaged(sibling):
            found.append((theirs.node == record.node, manifest.ended, sibling, manifest))
    return max(found, key=lambda candidate: candidate[:2])[2:] if found else None


def adopt(directory: Path, job: StageJob, record: IdentityRecord, siblings: Iterable[Path]) -> str | None:
    """Take over what is `adoptable`; returns its key, or None.

    Files that are never changed in place are linked, the others copied, to a folder that gets its name last: a kill
    before leaves nothing that counts.
    """
    if (found := adoptable(directory, record, siblings)) is None:
        return None
    source, manifest = found
    made = Path(tempfile.mkdtemp(prefix=TRASH_PREFIX, dir=source.parent))
    shutil.copymode(source, made)
    for path in source.rglob("*"):  # shutil.copytree would go on copying to a full disk, and lose its errno
        place = made / path.relative_to(source)
        if path.is_dir():
            place.mkdir(exist_ok=True)
        elif path.name not in (LOCK_FILE, RECORD_FILE):
            (os.link if path.suffix in _NEVER_CHANGED else shutil.copy2)(path, place)
    adopted = {"key": record.key, "upstream": record.identity.upstream, "adopted": manifest.key}
    return manifest.key if take_place(made, directory, job, record, manifest.model_copy(update=adopted)) else None


def take_place(made: Path, directory: Path, job: StageJob, record: IdentityRecord, manifest: Manifest) -> bool:
    """Make the files in `made` the finished stage in `directory`; False where that has begun meanwhile."""
    write_job(made / JOB_FILE, job)
    write_identity(made, record)
    write_manifest(made, manifest)
    try:
        made.rename(directory)
    except OSError:  # another run has just adopted it, or begun it
        shutil.rmtree(made, ignore_errors=True)
        return False
    return True


def _without_code(identity: Identity) -> Identity:
    """What two identities have to share for adoption: a setting that is null is as one that the other code lacks."""
    return replace(identity, code={}, upstream={}, keyed={}, settings=_without_null(identity.settings))


def _without_null(settings: Mapping[str, Json]) -> dict[str, Json]:
    return {
        name: _without_null(value) if isinstance(value, dict) else value
        for name, value in settings.items()
        if value is not None
    }


def clear(directory: Path, condition: Condition) -> None:
    """Remove the entries that `condition` lists as stale, the manifest first, so that a crash leaves no false claim.

    For a stage that starts from scratch the identity file is emptied first and deleted last: after a kill halfway, the
    remaining files do not count as those of an interrupted stage, and the next start goes on clearing.

    What killed writes and deletions left is removed, too: in `model/` it would become part of the result.
    """
    if IDENTITY_FILE in condition.stale:
        identity = directory / IDENTITY_FILE
        if not identity.is_file():
            delete(identity)
        with identity.open("wb") as file:
            os.fsync(file.fileno())
    for name in sorted(condition.stale, key=lambda name: (name == IDENTITY_FILE, name != MANIFEST_FILE)):
        delete(directory / name)
    for path in partial_writes(directory):
        delete(path, ignore_errors=True)  # the deletion that has renamed it may still be at work


def delete(path: Path, *, ignore_errors: bool = False) -> None:
    """Delete a file, a link or a folder without following links; `ignore_errors` of what is in a folder."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=ignore_errors)
    else:
        path.unlink(missing_ok=True)


def complete_checkpoints(directory: Path) -> dict[int, Path]:
    """Step and folder of each complete checkpoint of the stage in `directory`."""
    return {
        int(match[1]): folder
        for folder in (directory / CHECKPOINTS_FOLDER).glob("step_*")
        if (match := _STEP.fullmatch(folder.name)) and (folder / COMPLETE_FILE).is_file()
    }


def newest_checkpoint(directory: Path) -> tuple[int, Path] | None:
    """Step and folder of the newest complete checkpoint of the stage in `directory`; None without one."""
    return max(complete_checkpoints(directory).items(), default=None)


def is_temporary(path: Path) -> bool:
    """Whether this is the name of a file that replaces another one once it is written, or that is being deleted."""
    return _TEMPORARY.fullmatch(path.name) is not None or is_discarded(path)


def partial_writes(folder: Path) -> Iterator[Path]:
    """Temporary files and links, and discarded folders, in a stage's folder and all folders below it.

    Checkpoints are left out: each is either complete or garbage as a whole.
    """
    for path in sorted(folder.iterdir()) if folder.is_dir() and not folder.is_symlink() else ():
        if path.is_symlink() or path.is_file() or is_discarded(path):
            if is_temporary(path):
                yield path
        elif path.name != CHECKPOINTS_FOLDER:
            yield from partial_writes(path)


def _all_entries(directory: Path) -> tuple[str, ...]:
    entries = directory.iterdir() if directory.is_dir() else ()
    return tuple(sorted(entry.name for entry in entries if entry.name not in _KEPT))

"""Finished stages that a lab shares: `execution.shared_cache`, a folder or a URL that fsspec reads and writes.

<url>/<stage>/<key>/manifest.json     written last, by the first who has finished the stage
<url>/<stage>/<key>/<digest>/         its outputs, events and log, below the digest of the outputs

A key covers all that decides a result, so whoever needs the stage may take it. Checkpoints stay where they were
written. A cache that fails is a warning and never ends a run.
"""

import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import ValidationError

from luffy.errors import ConfigError, DataError, first_line
from luffy.pipeline.events import EVENTS_FILE
from luffy.pipeline.identity import IdentityRecord
from luffy.pipeline.job import StageJob
from luffy.pipeline.manifest import MANIFEST_FILE, Manifest, hash_file
from luffy.pipeline.reuse import LOG_FILE, take_place
from luffy.pipeline.workspace import TRASH_PREFIX

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

_BESIDE = (EVENTS_FILE, LOG_FILE)
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SharedCache:
    """The finished stages at one URL."""

    url: str
    files: "AbstractFileSystem"
    root: str
    failures: list[str] = field(default_factory=list)
    """After one that is not a damaged file, the cache is left alone: each would take the time of all tries."""

    @classmethod
    def open(cls, url: str) -> "SharedCache":
        """Looks at nothing yet. Raises ConfigError for a protocol that is unknown or lacks its package."""
        from fsspec.core import url_to_fs  # late: a run without a cache does not wait for it

        try:
            return cls(url, *url_to_fs(url if "://" in url else str(Path(url).expanduser())))
        except (ImportError, ValueError) as error:
            raise ConfigError(f"execution.shared_cache: {url}: {error}") from None

    def find(self, stage: str, key: str) -> Manifest | None:
        """The manifest of a result; None without one, or where it cannot be read."""
        if self.failures:
            return None
        with self._tolerant(f"whether it has {stage} {key} could not be seen"):
            try:
                text = self.files.cat_file(f"{self.root}/{stage}/{key}/{MANIFEST_FILE}")
                found = Manifest.model_validate_json(text)
            except (FileNotFoundError, ValidationError):  # of another version, or half written
                return None
            return found if (found.stage, found.key) == (stage, key) else None
        return None

    def pull(self, directory: Path, job: StageJob, record: IdentityRecord) -> Manifest | None:
        """Put the result into `directory`, which nothing has begun, every file checked; None where that failed.

        The folder gets its name last: a kill before leaves nothing that counts.
        """
        manifest = self.find(job.stage, record.key)
        if manifest is None or manifest.consumed != record.consumed:
            return None
        directory.parent.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(prefix=TRASH_PREFIX, dir=directory.parent))
        with ExitStack() as stack, self._tolerant(f"{record.node} could not be taken from it"):
            stack.callback(shutil.rmtree, made, ignore_errors=True)
            made.chmod(0o755)
            folder = self._folder(manifest)
            for output in manifest.outputs:
                place = made / output.path
                if not place.resolve().is_relative_to(made.resolve()):
                    raise DataError(f"its manifest names {output.path}, outside of the stage")
                self._get(f"{folder}/{output.path}", place)
                if hash_file(place) != output.sha256:
                    raise DataError(f"{folder}/{output.path} is damaged: delete {folder}")
                os.utime(place, ns=(output.mtime_ns, output.mtime_ns))
            for name in _BESIDE:
                if self.files.exists(f"{folder}/{name}"):
                    self._get(f"{folder}/{name}", made / name)
            return manifest if take_place(made, directory, job, record, manifest) else None
        return None

    def push(self, directory: Path, manifest: Manifest) -> bool:
        """Copy the result in `directory` there, unless a result of its key is there; whether it was copied."""
        if self.find(manifest.stage, manifest.key) is not None or self.failures:
            return False
        with self._tolerant(f"{manifest.node} could not be copied to it"):
            folder = self._folder(manifest)
            there = [name for name in _BESIDE if (directory / name).is_file()]
            for name in (*(output.path for output in manifest.outputs), *there):
                place = f"{folder}/{name}"
                self.files.makedirs(place.rpartition("/")[0], exist_ok=True)
                self.files.put_file(str(directory / name), place)
            text = manifest.model_dump_json(indent=1) + "\n"
            self.files.pipe_file(f"{folder.rpartition('/')[0]}/{MANIFEST_FILE}", text.encode())
            return True
        return False

    def _folder(self, manifest: Manifest) -> str:
        return f"{self.root}/{manifest.stage}/{manifest.key}/{manifest.digest[:16]}"

    def _get(self, there: str, place: Path) -> None:
        place.parent.mkdir(parents=True, exist_ok=True)
        self.files.get_file(there, str(place))
        with place.open("rb") as file:
            os.fsync(file.fileno())

    @contextmanager
    def _tolerant(self, what: str) -> Iterator[None]:
        """Failures of the cache, whose libraries have their own kinds, become a warning."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - as many kinds as there are packages for fsspec
            reason = first_line(error)
            if not isinstance(error, DataError):
                self.failures.append(reason)
            logger.warning("execution.shared_cache %s: %s (%s)", self.url, what, reason)

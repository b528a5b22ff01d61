"""The layout of a workspace: stages by key, runs by name.

<root>/stages/<stage>/<key>/         one directory per result
<root>/locks/<stage>-<key>.lock     held while a run makes a stage, or looks whether it is finished
<root>/runs/<experiment>-<n>/        run.json, links to the stages it used, the jobs of those that it started
<root>/prefect/                      the database of the embedded Prefect server
<root>/warm_server.log               log of the process that stages are forked from
"""

import fcntl
import json
import logging
import os
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from luffy.config import StageName
from luffy.errors import WorkspaceError
from luffy.files import write_atomic
from luffy.pipeline.disk import free_bytes, usable
from luffy.pipeline.lock import check_locks, try_lock

WORKSPACE_VARIABLE = "LUFFY_WORKSPACE"
RUN_FILE = "run.json"
JOBS_FOLDER = "jobs"
"""Folder of a run with the job of each stage that it started, by node."""
MIN_FREE_BYTES = 32 << 20
"""Free space required for the records, logs and Prefect's database of a run."""
TRASH_PREFIX = ".trash-"
"""Prefix of the names of entries that are being deleted and no longer read."""
logger = logging.getLogger(__name__)
_CLAIMS_FILE = ".claims.lock"
"""The lock between runs and garbage collection: shared by runs that begin or record a stage, exclusive for deletion.

So a run has recorded its process before garbage collection can consider the run dead, and has recorded a result before
garbage collection can find that no run uses it.
"""


@dataclass(frozen=True, slots=True)
class Workspace:
    """The paths below one root; creating the object touches no file."""

    root: Path

    @property
    def stages(self) -> Path:
        return self.root / "stages"

    @property
    def runs(self) -> Path:
        return self.root / "runs"

    @property
    def locks(self) -> Path:
        """Locks of the records of finished stages."""
        return self.root / "locks"

    @property
    def prefect_home(self) -> Path:
        return self.root / "prefect"

    @property
    def warm_log(self) -> Path:
        return self.root / "warm_server.log"

    def stage_directory(self, stage: StageName, key: str) -> Path:
        """Where the result `key` of `stage` is, or will be."""
        return self.stages / stage / key

    def siblings(self, stage: StageName) -> Iterator[Path]:
        """The directories of all results of `stage`, finished or not, in the order of their keys."""
        folder = self.stages / stage
        found = sorted(folder.iterdir()) if folder.is_dir() else []
        return (path for path in found if path.is_dir() and not is_discarded(path))

    def prepare(self) -> None:
        """Create the folders; raises WorkspaceError if they are not writable, have no locks, or the disk is full."""
        try:
            for folder in (self.stages, self.runs):
                folder.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=self.root, prefix=".probe.") as probe:
                probe.write(b"x" * 4096)
                probe.flush()
                os.fsync(probe.fileno())
        except FileExistsError as error:  # a file, or a link to nothing
            raise _unwritable(self.root, f"{error.filename} is not a folder") from None
        except OSError as error:
            raise _unwritable(self.root, error.strerror) from None
        check_locks(self.root)
        free = free_bytes(self.root)
        if free < MIN_FREE_BYTES:
            raise WorkspaceError(
                f"workspace {self.root}: its disk is full ({free >> 20} MiB left, a run needs {MIN_FREE_BYTES >> 20}); "
                f"free space (luffy gc lists what to delete), or give another with --workspace"
            )

    def new_run(self, experiment: str, record: dict[str, object]) -> Path:
        """A new directory `runs/<experiment>-<n>/` with `record` in its run.json; `n` is the first that was free."""
        number = 1 + max(self.run_numbers(experiment), default=0)
        self.runs.mkdir(parents=True, exist_ok=True)
        while True:
            directory = self.runs / f"{experiment}-{number}"
            try:
                directory.mkdir()
                break
            except FileExistsError:
                number += 1  # another run has just taken it
        write_run(directory, record)
        return directory

    def run_numbers(self, experiment: str) -> Iterator[int]:
        """The numbers of the runs of `experiment`, in no order."""
        for directory in self.runs.iterdir() if self.runs.is_dir() else ():
            name, _, number = directory.name.rpartition("-")
            if name == experiment and number.isdecimal():
                yield int(number)


def find_workspace(chosen: Path | str | None = None) -> Workspace:
    """The workspace: `chosen`, else the environment's LUFFY_WORKSPACE, else ./workspace.

    Raises WorkspaceError where a file is in its place, where one may not even look, or where no path is meant.
    """
    given = Path(chosen or os.environ.get(WORKSPACE_VARIABLE) or "workspace")
    try:
        root = given.expanduser().resolve()
        if circle := next((path for path in (root, *root.parents) if path.is_symlink()), None):
            raise _unwritable(given, f"Symlink loop from {str(circle)!r}")  # Python 3.13 resolves all but those
        there = next(path for path in (root, *root.parents) if path.exists())
        str(root).encode()
    except OSError as error:
        raise _unwritable(given, error.strerror) from None
    except RuntimeError as error:  # links in a circle, or the home folder of a user who does not exist
        raise _unwritable(given, str(error).rstrip(".")) from None
    except UnicodeEncodeError:
        raise _unwritable(given, "its name is not UTF-8, as the records of runs are") from None
    if not there.is_dir():
        raise _unwritable(root, f"{there} is not a folder")
    return Workspace(root)


@contextmanager
def claiming(workspace: Workspace, *, exclusive: bool = False) -> Iterator[None]:
    """Lock while a run begins, or decides on a stage and records it; waits for a deletion to end.

    A deletion has it `exclusive`, from the survey of garbage until it is renamed.
    """
    mode = fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH
    with usable(workspace.root):
        file = (workspace.root / _CLAIMS_FILE).open("a+b")  # NFS shares locks only of files open for reading
    with file:
        if not try_lock(file.fileno(), mode):
            other = "runs that begin a stage" if exclusive else "`luffy gc`, which decides what to delete"
            logger.warning("waiting in %s for %s", workspace.root, other)
            fcntl.flock(file, mode)
        yield


def _unwritable(root: Path, reason: str | None) -> WorkspaceError:
    return WorkspaceError(
        f"workspace {root}: cannot be written ({reason}); give another with --workspace or {WORKSPACE_VARIABLE}"
    )


def is_discarded(path: Path) -> bool:
    """Whether `path` was left by an interrupted deletion."""
    return path.name.startswith(TRASH_PREFIX)


def write_run(directory: Path, record: dict[str, object]) -> None:
    write_atomic(directory / RUN_FILE, json.dumps(record, indent=1, ensure_ascii=False) + "\n")


def link(target: Path, name: Path) -> None:
    """Make `name` a relative symbolic link to `target`, in place of an older one."""
    name.parent.mkdir(parents=True, exist_ok=True)
    relative = os.path.relpath(target, name.parent)
    temporary = name.with_name(f".{name.name}.{os.getpid()}-{threading.get_ident()}")
    temporary.symlink_to(relative)
    temporary.replace(name)

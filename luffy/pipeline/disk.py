"""Sizes of folders, free space on their disk, and disks that are full or read-only, which are reported in one line."""

import errno
import os
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from luffy.errors import WorkspaceError

READ_ONLY = "is read-only"
_FULL = (errno.ENOSPC, errno.EDQUOT)
_READ_ONLY = (errno.EROFS,)
_FORBIDDEN = (errno.EACCES, errno.EPERM)
_MISPLACED = (errno.EEXIST, errno.ENOTDIR, errno.ELOOP)
# Messages of libraries that drop the error number: safetensors, and errors relayed from another process.
_FULL_WORDS = ("No space left on device", "os error 28", "Disk quota exceeded", "os error 122")
_READ_ONLY_WORDS = ("Read-only file system", "os error 30")


def measure(*paths: Path) -> int:
    """Bytes of files and folders; links are not followed, what vanishes meanwhile does not count."""
    return sum(stat.st_size for stat in _stats(paths))


def freed_bytes(*paths: Path) -> int:
    """Bytes that deleting `paths` frees: not those of files with another hard link elsewhere."""
    names = Counter((stat.st_dev, stat.st_ino, stat.st_size, stat.st_nlink) for stat in _stats(paths))
    return sum(num_bytes for (_, _, num_bytes, in_all), here in names.items() if here >= in_all)


def free_bytes(path: Path) -> int:
    """Free bytes for an ordinary user at `path`, or at the nearest existing folder above it."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return shutil.disk_usage(path).free


def lack_of_space(error: BaseException) -> str | None:
    """The problem with the disk that caused `error`, in words; None where it has another cause."""
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        number = cause.errno if isinstance(cause, OSError) else None
        words = str(cause)
        if number in _FULL or any(part in words for part in _FULL_WORDS):
            return "no space left"
        if number in _READ_ONLY or any(part in words for part in _READ_ONLY_WORDS):
            return READ_ONLY
        cause = cause.__cause__ or cause.__context__
    return None


@contextmanager
def usable(path: Path) -> Iterator[None]:
    """Turns a full, read-only or forbidden disk into a WorkspaceError."""
    try:
        yield
    except OSError as error:
        if error.errno not in (*_FULL, *_READ_ONLY, *_FORBIDDEN, *_MISPLACED):
            raise
        remedy = "free space (luffy gc lists what to delete), or " if error.errno in _FULL else ""
        remedy = "remove what is in the place of a folder, or " if error.errno in _MISPLACED else remedy
        raise WorkspaceError(
            f"workspace: {error.filename or path}: {error.strerror}; {remedy}give another with --workspace"
        ) from None


def _stats(paths: Iterable[Path]) -> Iterator[os.stat_result]:
    for path in paths:
        files: Iterable[Path] = [path]
        if path.is_dir() and not path.is_symlink():
            files = (Path(folder, name) for folder, _, names in os.walk(path) for name in names)
        for file in files:
            with suppress(FileNotFoundError):
                yield file.lstat()

"""Atomic file writes: a reader sees a file whole or not at all, even after a kill or a power cut. Files of lines."""

import errno
import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

_FICLONE = 0x40049409
"""The request of `ioctl_ficlone(2)`; Python has named it since 3.12."""
_KINDS = {
    "a regular file": stat.S_ISREG,
    "a folder": stat.S_ISDIR,
    "a pipe": stat.S_ISFIFO,
    "a socket": stat.S_ISSOCK,
    "a device": lambda mode: stat.S_ISCHR(mode) or stat.S_ISBLK(mode),
}


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """A file to write, which replaces `path` when the context ends, and is deleted when the context raises."""
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).chmod(0o644)
        Path(temporary).replace(path)
    finally:
        Path(temporary).unlink(missing_ok=True)  # it is still there only after an error
    sync_directory(path.parent)


def write_atomic(path: Path, text: str) -> None:
    """Replace the contents of `path` with `text` (UTF-8)."""
    with replacing(path) as file:
        file.write(text.encode())


class LineAppender:
    """Appends lines to a file, each in one system call: a kill leaves at most one torn line, which spoils no other.

    Lines of several processes do not mix.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path.open("ab", buffering=0)
        with path.open("rb") as file:
            file.seek(max(file.seek(0, os.SEEK_END) - 1, 0))
            self._is_torn = file.read(1) not in (b"", b"\n")

    def append(self, line: bytes) -> None:
        """Write `line` with its newline; when this returns, it survives the death of this process.

        Raises OSError where only a part of it, or nothing, could be written.
        """
        left = memoryview(b"\n" * self._is_torn + line + b"\n")
        while left:  # a disk that becomes full takes a part without an error; the rest then raises it
            num_bytes = self._file.write(left)
            left = left[num_bytes:]
            self._is_torn = bool(left)

    def sync(self) -> None:
        """Make all lines survive a power cut."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file; may be called twice."""
        self._file.close()

    @property
    def is_closed(self) -> bool:
        return self._file.closed


def sync_directory(directory: Path) -> None:
    """Make the renames inside `directory` durable."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def kind_of_file(path: Path) -> str:
    """What is at `path`, in words: `a regular file`, `a pipe`."""
    try:
        mode = path.stat().st_mode
    except OSError:
        return "a link that leads nowhere" if path.is_symlink() else "nothing"
    return next((words for words, is_kind in _KINDS.items() if is_kind(mode)), "no regular file")


def refuse_special(path: Path) -> None:
    """Raise OSError for a device, a pipe or a socket: it may have no end, or keep its reader waiting forever."""
    if path.exists() and not path.is_file() and not path.is_dir():
        raise OSError(errno.EINVAL, f"it is {kind_of_file(path)}; give a regular file", str(path))


def link_or_copy(source: str, target: str) -> str:
    """Put `source` at `target`: a hard link where the file system has them, else a copy. For `shutil.copytree`.

    Only for files that are never changed in place.
    """
    Path(target).unlink(missing_ok=True)
    try:
        os.link(os.path.realpath(source), target)
    except OSError:
        shutil.copy2(source, target)
    return target


def clone_or_copy(source: str, target: str) -> str:
    """Put a copy of `source` at `target`, which shares its blocks where the file system can. For `shutil.copytree`.

    Unlike a hard link it stays as it is when somebody writes into `source` later.
    """
    Path(target).unlink(missing_ok=True)
    try:
        with Path(source).open("rb") as original, Path(target).open("xb") as copy:
            fcntl.ioctl(copy.fileno(), _FICLONE, original.fileno())
        shutil.copystat(source, target)
    except OSError:  # the file system cannot, or it is another one
        if Path(source).stat().st_size > shutil.disk_usage(Path(target).parent).free:  # a sparse file grows when copied
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), target) from None
        shutil.copy2(source, target)
    return target

"""Writing a file so that a reader sees the old text or the new one, never a part, even after a power cut."""

import contextlib
import os
import tempfile
from pathlib import Path


def write_atomic(path: Path, text: str) -> None:
    """Replace `path` by `text` (UTF-8): a temporary neighbour, fsync, rename, fsync of the directory."""
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).chmod(0o644)
        Path(temporary).replace(path)
    except BaseException:  # also on an interrupt, no temporary file stays behind
        with contextlib.suppress(FileNotFoundError):
            Path(temporary).unlink()
        raise
    sync_directory(path.parent)


def sync_directory(directory: Path) -> None:
    """Make the renames inside `directory` durable."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

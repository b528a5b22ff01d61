"""Sizes of folders, and free space on their disk."""

import os
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Extent:
    """The files of a folder, or of several."""

    num_bytes: int
    """Sum of the file sizes."""
    inodes: Counter[tuple[int, int, int, int]] = field(default_factory=Counter)
    """How many names each file has here: device, inode, bytes, and names in all."""

    @property
    def freed_bytes(self) -> int:
        """Bytes that deleting it frees: not those of files with another hard link elsewhere."""
        return sum(num_bytes for (_, _, num_bytes, names), here in self.inodes.items() if here >= names)


def measure(*paths: Path) -> Extent:
    """The extent of files and folders; links are not followed, what vanishes meanwhile does not count."""
    total, inodes = 0, Counter[tuple[int, int, int, int]]()
    for stat in _stats(paths):
        total += stat.st_size
        inodes[stat.st_dev, stat.st_ino, stat.st_size, stat.st_nlink] += 1
    return Extent(total, inodes)


def joined(extents: Iterable[Extent]) -> Extent:
    """The sum of `extents`."""
    total, inodes = 0, Counter[tuple[int, int, int, int]]()
    for extent in extents:
        total += extent.num_bytes
        inodes.update(extent.inodes)
    return Extent(total, inodes)


def free_bytes(path: Path) -> int:
    """Free bytes for an ordinary user at `path`, or at the nearest existing folder above it."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return shutil.disk_usage(path).free


def _stats(paths: Iterable[Path]) -> Iterator[os.stat_result]:
    for path in paths:
        if path.is_dir() and not path.is_symlink():
            for folder, _, names in os.walk(path):
                yield from filter(None, (_stat(Path(folder, name)) for name in names))
        else:
            yield from filter(None, [_stat(path)])


def _stat(path: Path) -> os.stat_result | None:
    try:
        return path.lstat()
    except FileNotFoundError:
        return None

"""Temporary files that a killed write leaves: those of `luffy.files.replacing`, of run links, and of safetensors."""

import re
from collections.abc import Iterator
from pathlib import Path

from luffy.pipeline.chain.checkpoints import CHECKPOINTS_FOLDER

_TEMPORARY = re.compile(r"\..+\.([a-z0-9_]{8}|\d+-\d+)|\.tmp[A-Za-z0-9]{6}")


def is_temporary(path: Path) -> bool:
    """Whether this is the name of a file that replaces another one once it is written."""
    return _TEMPORARY.fullmatch(path.name) is not None


def partial_writes(folder: Path) -> Iterator[Path]:
    """Temporary files and links in a stage's folder and all folders below it.

    Checkpoints are left out: each is either complete or garbage as a whole.
    """
    for path in sorted(folder.iterdir()) if folder.is_dir() and not folder.is_symlink() else ():
        if path.is_symlink() or path.is_file():
            if is_temporary(path):
                yield path
        elif path.name != CHECKPOINTS_FOLDER:
            yield from partial_writes(path)

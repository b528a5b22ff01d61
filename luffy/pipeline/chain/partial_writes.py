"""What a kill leaves in a stage: temporary files of a write (those of `luffy.files.replacing`, of run links, and of
safetensors), and what an interrupted deletion has renamed."""

import re
from collections.abc import Iterator
from pathlib import Path

from luffy.pipeline.chain.checkpoints import CHECKPOINTS_FOLDER
from luffy.pipeline.workspace import is_discarded

_TEMPORARY = re.compile(r"\..+\.([a-z0-9_]{8}|\d+-\d+)|\.tmp[A-Za-z0-9]{6}")


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

"""Continues a finished run of `sft` or `rl` in a longer one of the same series; the shorter run is not modified."""

import shutil
from collections.abc import Sequence
from pathlib import Path

from luffy.files import link_or_copy
from luffy.pipeline.reuse import CHECKPOINTS_FOLDER, newest_checkpoint

_HISTORY = ("metrics.jsonl", "samples.jsonl")


def adopt_shorter_run(finished: Path, out: Path, folders: Sequence[str] = ()) -> None:
    """Copy the history, the `folders` and the newest checkpoint of `finished` to `out`.

    The checkpoint comes last, by a single rename: after a kill before that, the longer run starts from the beginning.
    """
    newest = newest_checkpoint(finished)
    if newest is None or not all((finished / name).is_dir() for name in folders):
        return  # deleted since the plan was made: the longer run starts from the beginning
    checkpoint = newest[1]
    for name in _HISTORY:
        if (finished / name).exists():
            shutil.copy2(finished / name, out / name)
    for name in folders:
        shutil.copytree(finished / name, out / name, copy_function=link_or_copy, dirs_exist_ok=True)
    incoming = out / CHECKPOINTS_FOLDER / f"incoming_{checkpoint.name}"
    shutil.rmtree(incoming, ignore_errors=True)
    shutil.copytree(checkpoint, incoming, copy_function=link_or_copy)
    target = out / CHECKPOINTS_FOLDER / checkpoint.name
    shutil.rmtree(target, ignore_errors=True)  # an incomplete checkpoint left by a kill
    incoming.replace(target)

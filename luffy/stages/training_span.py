"""From which step a training stage goes on, where it ends, and what it exports then."""

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from luffy.files import link_or_copy
from luffy.pipeline.reuse import CHECKPOINTS_FOLDER, newest_checkpoint
from luffy.tracking.metrics import TokenBudget

_HISTORY = ("metrics.jsonl", "samples.jsonl")
Exporter = Callable[[Path], None]
"""Writes the current weights as a model folder."""


class EarlyStop(Protocol):
    """A validation, or none."""

    @property
    def is_over(self) -> bool:
        """Whether it ends training."""
        ...


class Unmeasured:
    """No validation: the stage trains to the last step, and its result is the last weights."""

    is_over = False

    def __init__(self, export: Exporter) -> None:
        self._export = export

    def measure(self, step: int, *, last: bool = False) -> dict[str, float]:
        """Nothing is measured."""
        return {}

    def export(self, folder: Path) -> None:
        self._export(folder)


def end_of_training(held_out: EarlyStop, budget: TokenBudget) -> str | None:
    """The setting that ends training before its last step; None: training continues."""
    if held_out.is_over:
        return "validation.patience"
    return "max_tokens" if budget.is_over else None


def adopt_shorter_run(finished: Path, out: Path, folders: Sequence[str] = ()) -> None:
    """Continue a finished run of `sft` or `rl` in a longer one of the same series; the shorter run is not modified.

    Copies the history, the `folders` and the newest checkpoint of `finished` to `out`.

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

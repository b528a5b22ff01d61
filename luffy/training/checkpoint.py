"""Checkpoints that count only when complete, written before an older one goes.

`checkpoints/step_000040/` holds the engine's states, `state.json` and, last of all, `COMPLETE`.
"""

import json
import os
import shutil
from pathlib import Path

import deepspeed

from luffy.errors import CheckpointError

_MARKER = "COMPLETE"
_STATE = "state.json"


class CheckpointStore:
    """The checkpoints of one stage directory."""

    def __init__(self, directory: Path, keep: int) -> None:
        self._directory = directory
        self._keep = keep

    def newest(self) -> int | None:
        """The step of the newest complete checkpoint; None when there is none."""
        return max(self._complete_steps(), default=None)

    def save(self, engine: deepspeed.DeepSpeedEngine, step: int, state: dict[str, object] | None = None) -> None:
        """Write the engine's states and `state` as the checkpoint of `step`, then drop all but the newest."""
        folder = self._folder(step)
        shutil.rmtree(folder, ignore_errors=True)
        self._directory.mkdir(parents=True, exist_ok=True)
        engine.save_checkpoint(str(self._directory), tag=folder.name, save_latest=False)
        (folder / _STATE).write_text(json.dumps(state or {}), encoding="utf-8")
        _sync(folder)
        (folder / _MARKER).touch()
        _sync(folder)
        self._prune(step)

    def load(self, engine: deepspeed.DeepSpeedEngine, step: int) -> dict[str, object]:
        """Put the states of `step` into the engine and return what was saved beside them."""
        folder = self._folder(step)
        if not (folder / _MARKER).exists():
            raise CheckpointError(f"{folder} is not a complete checkpoint")
        loaded, _ = engine.load_checkpoint(str(self._directory), tag=folder.name)
        if loaded is None:
            raise CheckpointError(f"{folder} could not be read by DeepSpeed; delete it to resume from an older one")
        return json.loads((folder / _STATE).read_text(encoding="utf-8"))

    def _complete_steps(self) -> list[int]:
        return [int(marker.parent.name.removeprefix("step_")) for marker in self._directory.glob(f"step_*/{_MARKER}")]

    def _prune(self, newest: int) -> None:
        keep = set(sorted(self._complete_steps())[-self._keep :])
        for folder in self._directory.glob("step_*"):
            step = int(folder.name.removeprefix("step_"))
            if step not in keep and step <= newest:
                shutil.rmtree(folder)

    def _folder(self, step: int) -> Path:
        return self._directory / f"step_{step:06d}"


def _sync(folder: Path) -> None:
    """Force the folder's files and entries to disk, so that a marker never outlives its contents."""
    for path in [*folder.iterdir(), folder]:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)

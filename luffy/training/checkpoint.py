"""Checkpoints that count only when complete, written before an older one goes.

`checkpoints/step_000040/` holds the engine's states, `layout.json` and, last of all, `COMPLETE`.
"""

import json
import os
import shutil
from pathlib import Path

import deepspeed

from luffy.errors import CheckpointError, ConfigError
from luffy.files import sync_directory
from luffy.pipeline.checkpoints import CHECKPOINTS_FOLDER, COMPLETE_FILE, complete_checkpoints

_LAYOUT = "layout.json"


class CheckpointStore:
    """The checkpoints in the stage directory `stage`; the newest `keep` stay."""

    def __init__(self, stage: Path, keep: int) -> None:
        self._stage = stage
        self._directory = stage / CHECKPOINTS_FOLDER
        self._keep = keep

    def newest(self) -> int | None:
        """The step of the newest complete checkpoint; None when there is none."""
        return max(complete_checkpoints(self._stage), default=None)

    def save(self, engine: deepspeed.DeepSpeedEngine, step: int) -> None:
        """Write the engine's states as the checkpoint of `step`, then drop all but the newest."""
        folder = self._folder(step)
        shutil.rmtree(folder, ignore_errors=True)
        self._directory.mkdir(parents=True, exist_ok=True)
        engine.save_checkpoint(str(self._directory), tag=folder.name, save_latest=False)
        (folder / _LAYOUT).write_text(json.dumps(_layout(engine)), encoding="utf-8")
        _sync(folder)
        (folder / COMPLETE_FILE).touch()
        _sync(folder)
        self._prune()

    def load(self, engine: deepspeed.DeepSpeedEngine, step: int) -> None:
        """Put the states of `step` into the engine.

        Raises ConfigError when it was written under another ZeRO stage or number of ranks, CheckpointError when it is
        not complete.
        """
        folder = self._folder(step)
        if not (folder / COMPLETE_FILE).exists():
            raise CheckpointError(f"{folder} is not a complete checkpoint")
        written, now = json.loads((folder / _LAYOUT).read_text(encoding="utf-8")), _layout(engine)
        if written != now:
            raise ConfigError(
                f"execution: {folder} was written with {_words(written)}, this run has {_words(now)}; "
                f"resume with the former, or delete {self._directory} to start the stage anew"
            )
        loaded, _ = engine.load_checkpoint(str(self._directory), tag=folder.name)
        if loaded is None:
            raise CheckpointError(f"{folder} could not be read by DeepSpeed; delete it to resume from an older one")

    def _prune(self) -> None:
        for step in sorted(complete_checkpoints(self._stage))[: -self._keep]:
            # Marker first: a kill in the middle must not leave half a checkpoint that says it is whole.
            (self._folder(step) / COMPLETE_FILE).unlink()
            shutil.rmtree(self._folder(step))

    def _folder(self, step: int) -> Path:
        return self._directory / f"step_{step:06d}"


def _layout(engine: deepspeed.DeepSpeedEngine) -> dict[str, int]:
    """What decides how DeepSpeed cuts its files."""
    return {"zero_stage": int(engine.zero_optimization_stage()), "ranks": int(engine.world_size)}


def _words(layout: dict[str, int]) -> str:
    return ", ".join(f"{name} {value}" for name, value in layout.items())


def _sync(folder: Path) -> None:
    """Force the folder's files and entries to disk, so that a marker never outlives its contents."""
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
    sync_directory(folder)

"""Checkpoints that count only when complete, written before an older one goes.

`checkpoints/step_000040/` holds a folder of states for each engine (`policy/`, `critic/`), `state.json` (what the
stage itself must remember: replay buffers, controllers), `layout.json` and, last of all, `COMPLETE`.
"""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import deepspeed

from luffy.errors import CheckpointError, ConfigError
from luffy.files import sync_directory
from luffy.pipeline.checkpoints import CHECKPOINTS_FOLDER, COMPLETE_FILE, complete_checkpoints

_LAYOUT = "layout.json"
_STATE = "state.json"

Engines = Mapping[str, deepspeed.DeepSpeedEngine]
"""What is trained, by the name of its folder in a checkpoint."""


class CheckpointStore:
    """The checkpoints in the stage directory `stage`; the newest `keep` stay."""

    def __init__(self, stage: Path, keep: int) -> None:
        self._stage = stage
        self._directory = stage / CHECKPOINTS_FOLDER
        self._keep = keep

    def newest(self) -> int | None:
        """The step of the newest complete checkpoint; None when there is none."""
        return max(complete_checkpoints(self._stage), default=None)

    def save(self, engines: Engines, step: int, state: Mapping[str, object] | None = None) -> None:
        """Write the states of the engines and of the stage as the checkpoint of `step`, then drop all but the newest.

        `state` is plain JSON and comes back from `load` exactly as it is.
        """
        folder = self._folder(step)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for name, engine in engines.items():
            engine.save_checkpoint(str(folder), tag=name, save_latest=False)
        (folder / _STATE).write_text(_plain_json(state or {}), encoding="utf-8")
        (folder / _LAYOUT).write_text(json.dumps(_layout(engines)), encoding="utf-8")
        _sync(folder)
        (folder / COMPLETE_FILE).touch()
        sync_directory(folder)
        sync_directory(self._directory)
        self._prune()

    def load(self, engines: Engines, step: int) -> dict[str, object]:
        """Put the states of `step` into the engines; returns the stage's own state.

        Raises ConfigError when it was written of other engines, under another ZeRO stage or number of ranks,
        CheckpointError when it is not complete.
        """
        folder = self._folder(step)
        if not (folder / COMPLETE_FILE).exists():
            raise CheckpointError(f"{folder} is not a complete checkpoint")
        self._refuse_other_layout(folder, _layout(engines))
        for name, engine in engines.items():
            loaded, _ = engine.load_checkpoint(str(folder), tag=name)
            if loaded is None:
                raise CheckpointError(
                    f"{folder / name} could not be read by DeepSpeed; delete {folder} to resume from an older one"
                )
        return json.loads((folder / _STATE).read_text(encoding="utf-8"))

    def _refuse_other_layout(self, folder: Path, now: dict[str, object]) -> None:
        written = json.loads((folder / _LAYOUT).read_text(encoding="utf-8"))
        if written != now:
            raise ConfigError(
                f"execution: {folder} was written with {_words(written)}, this run has {_words(now)}; "
                f"resume with the former, or delete {self._directory} to start the stage anew"
            )

    def _prune(self) -> None:
        for step in sorted(complete_checkpoints(self._stage))[: -self._keep]:
            # Marker first: a kill in the middle must not leave half a checkpoint that says it is whole.
            (self._folder(step) / COMPLETE_FILE).unlink()
            shutil.rmtree(self._folder(step))

    def _folder(self, step: int) -> Path:
        return self._directory / f"step_{step:06d}"


def _layout(engines: Engines) -> dict[str, object]:
    """What decides how DeepSpeed cuts its files, and whose files there are."""
    any_engine = next(iter(engines.values()))
    return {
        "zero_stage": int(any_engine.zero_optimization_stage()),
        "ranks": int(any_engine.world_size),
        "engines": sorted(engines),
    }


def _words(layout: dict[str, object]) -> str:
    return ", ".join(
        f"{name} {' and '.join(value) if isinstance(value, list) else value}" for name, value in layout.items()
    )


def _plain_json(state: Mapping[str, object]) -> str:
    for name, value in state.items():
        assert _comes_back(value), f"checkpoint state {name!r} must be plain JSON: no NaN, no tuple, keys of text"
    return json.dumps(state)


def _comes_back(value: object) -> bool:
    try:
        return bool(json.loads(json.dumps(value, allow_nan=False)) == value)
    except (TypeError, ValueError):
        return False


def _sync(folder: Path) -> None:
    """Force all files and entries below `folder` to disk, so that a marker never outlives its contents."""
    for path in folder.rglob("*"):
        if path.is_dir():
            sync_directory(path)
        else:
            with path.open("rb") as file:
                os.fsync(file.fileno())
    sync_directory(folder)

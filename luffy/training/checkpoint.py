"""Atomic checkpoints that can be loaded with another number of ranks or ZeRO stage, and their export as a model folder.

`checkpoints/step_000040/` holds a folder for each engine (`policy/`, `critic/`) into which every rank writes its share,
`reference/` where the reference follows the policy (rank 0 writes it, since every rank holds all of it),
`state.json` (the state of the stage: replay buffer, controllers), `layout.json` (ranks and ZeRO stage) and, written
last, `COMPLETE`. An older checkpoint is deleted only after a newer one is complete. A checkpoint with the file `EXTRA`
is off the schedule: it was written because the stage had to end, and is deleted after the next one is complete.
"""

import json
import logging
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import deepspeed
import torch.distributed as dist
from torch import Tensor

from luffy.config.model import DType
from luffy.config.settings import RLSettings, SFTSettings
from luffy.errors import CheckpointError, ConfigError
from luffy.files import sync_directory, write_atomic
from luffy.pipeline.job import JOB_FILE, inputs_of, read_job
from luffy.pipeline.manifest import MANIFEST_FILE
from luffy.pipeline.reuse import CHECKPOINTS_FOLDER, COMPLETE_FILE, complete_checkpoints
from luffy.training.adapter import ADAPTER_FOLDER, Adapter
from luffy.training.engine_state import (
    PieceKey,
    PieceReader,
    publish,
    read_engine,
    read_whole,
    write_engine,
    write_whole,
)
from luffy.training.model_folder import copy_tokenizer, load_causal_lm, own_weights, write_model_folder
from luffy.training.policy_model import PolicyModel

logger = logging.getLogger(__name__)

_LAYOUT = "layout.json"
_STATE = "state.json"
_EXTRA = "EXTRA"

Engines = Mapping[str, deepspeed.DeepSpeedEngine]
"""Engines by the names of their folders in a checkpoint."""
Frozen = Mapping[str, Mapping[str, Tensor]]
"""Weights without an optimizer, the same on every rank: by name, under the names of their folders."""
_NONE: Frozen = {}
_T = TypeVar("_T")


class CheckpointStore:
    """The checkpoints in the stage directory `stage`, shared by all ranks; the newest `keep` are kept.

    `save` and `load` are collective calls. An error on one rank is raised on every rank.
    """

    def __init__(self, stage: Path, keep: int) -> None:
        self._stage = stage
        self._directory = stage / CHECKPOINTS_FOLDER
        self._keep = keep

    def newest(self) -> int | None:
        """The step of the newest complete checkpoint; None when there is none.

        Call it on one rank and broadcast the result, or on all ranks before any of them trains.
        """
        return max(complete_checkpoints(self._stage), default=None)

    def save(
        self,
        engines: Engines,
        step: int,
        state: Mapping[str, object] | None = None,
        frozen: Frozen = _NONE,
        *,
        is_extra: bool = False,
    ) -> None:
        """Write engines, frozen weights and the state of the stage as the checkpoint of `step`; delete old checkpoints.

        `state` is plain JSON, taken from rank 0, and `load` returns it unchanged. `step` has to be later than all
        complete checkpoints: none is ever overwritten, so a killed run keeps at least the previous one. With `is_extra`
        it does not count towards the `keep` newest.
        """
        folder = self._folder(step)
        _on_first_rank(lambda: self._begin(folder, step, _plain_json(state or {}), _layout(engines, frozen), is_extra))
        _on_all_ranks(lambda: _write(engines, frozen, folder))
        _on_first_rank(lambda: self._finish(folder))

    def load(self, engines: Engines, step: int, frozen: Frozen = _NONE) -> dict[str, Any]:
        """Load the checkpoint of `step` into the engines and frozen weights; returns the state that `save` got.

        Raises ConfigError when it holds other engines, CheckpointError when it is incomplete or broken.
        """
        if len(set(_gather(step))) > 1:
            raise CheckpointError(f"{self._directory}: the ranks see different checkpoints; is it on a shared disk?")
        state = _on_all_ranks(lambda: self._read(engines, frozen, self._folder(step)))
        for engine in engines.values():
            publish(engine)
        return state

    def _begin(self, folder: Path, step: int, state: str, layout: dict[str, object], is_extra: bool) -> None:
        newest = self.newest()
        assert newest is None or newest < step, f"step {step} does not come after the checkpoint of step {newest}"
        if folder.exists():  # left by a killed run
            shutil.rmtree(folder)
        folder.mkdir(parents=True)
        write_atomic(folder / _STATE, state)
        write_atomic(folder / _LAYOUT, json.dumps(layout))
        if is_extra:
            (folder / _EXTRA).touch()

    def _finish(self, folder: Path) -> None:
        """Mark the checkpoint as complete once its files are on disk; delete those that are no longer kept."""
        sync_directory(folder)
        sync_directory(self._directory)
        (folder / COMPLETE_FILE).touch()
        sync_directory(folder)
        complete = [folder for _, folder in sorted(complete_checkpoints(self._stage).items())]
        # The newest, and the `keep` newest on the schedule.
        kept = {complete[-1], *[folder for folder in complete if not (folder / _EXTRA).exists()][-self._keep :]}
        for old in self._directory.glob("step_*"):
            if old not in kept:
                # Marker first: a kill halfway must not leave a partial checkpoint that is marked as complete.
                (old / COMPLETE_FILE).unlink(missing_ok=True)
                shutil.rmtree(old)

    def _read(self, engines: Engines, frozen: Frozen, folder: Path) -> dict[str, Any]:
        if not (folder / COMPLETE_FILE).exists():
            raise CheckpointError(f"{folder} is not a complete checkpoint")
        written, now = json.loads((folder / _LAYOUT).read_text(encoding="utf-8")), _layout(engines, frozen)
        if written["engines"] != now["engines"]:
            raise ConfigError(
                f"{folder} was written with {_words(written)}, this run has {_words(now)}; "
                f"resume with the same engines, or delete {self._directory} to restart the stage"
            )
        if written != now and dist.get_rank() == 0:
            logger.info("%s was written with %s, this run has %s", folder.name, _words(written), _words(now))
        for name, engine in engines.items():
            read_engine(engine, folder / name)
        for name, weights in frozen.items():
            read_whole(folder / name, weights)
        return json.loads((folder / _STATE).read_text(encoding="utf-8"))

    def _folder(self, step: int) -> Path:
        return self._directory / f"step_{step:06d}"


def _write(engines: Engines, frozen: Frozen, folder: Path) -> None:
    for name, engine in engines.items():
        # Created by every rank: on a network file system, others may not see rank 0's folder at once.
        (folder / name).mkdir(parents=True, exist_ok=True)
        write_engine(engine, folder / name)
        sync_directory(folder / name)
    if dist.get_rank() == 0:
        for name, weights in frozen.items():
            (folder / name).mkdir()
            write_whole(folder / name, weights)
            sync_directory(folder / name)


def _layout(engines: Engines, frozen: Frozen) -> dict[str, object]:
    any_engine = next(iter(engines.values()))
    return {
        "zero_stage": int(any_engine.zero_optimization_stage()),
        "ranks": int(any_engine.world_size),
        "engines": sorted([*engines, *frozen]),
    }


def _words(layout: dict[str, object]) -> str:
    return ", ".join(
        f"{name} {' and '.join(value) if isinstance(value, list) else value}" for name, value in layout.items()
    )


def _on_first_rank(work: Callable[[], None]) -> None:
    _on_all_ranks(work if dist.get_rank() == 0 else lambda: None)


def _on_all_ranks(work: Callable[[], _T]) -> _T:
    """Run `work`, which has no collective calls, on every rank; an error on one rank is raised on all.

    Otherwise the other ranks would wait for the failed one forever.
    """
    try:
        done = work()
    except Exception as error:  # whatever it is, the other ranks wait for it
        _gather(f"{type(error).__name__}: {error}")
        raise
    faults: list[str | None] = _gather(None)
    for rank, fault in enumerate(faults):
        if fault is not None:
            raise CheckpointError(f"rank {rank} failed at the checkpoint: {fault}")
    return done


def _gather(mine: _T) -> list[_T]:
    """The values of all ranks, in order of rank."""
    theirs = [mine] * dist.get_world_size()
    dist.all_gather_object(theirs, mine)
    return theirs


def _plain_json(state: Mapping[str, object]) -> str:
    for name, value in state.items():
        try:
            survives = json.loads(json.dumps(value, allow_nan=False)) == value
        except (TypeError, ValueError):
            survives = False
        assert survives, f"checkpoint state {name!r} must be plain JSON: no NaN, no tuples, string keys"
    return json.dumps(state)


_MODEL = "model"


def export_checkpoint(checkpoint: Path, stage: Path, tokenizer: Path, dtype: DType, folder: Path) -> None:
    """Write the policy of `checkpoint` to `folder`: safetensors, configurations, tokenizer and chat template.

    `stage` is the directory of the stage, `sft` or `rl`, that wrote the checkpoint. An adapter is merged, and also
    written by itself. Runs in one process, whatever the number of ranks that wrote the checkpoint. Raises
    CheckpointError for a broken checkpoint, ConfigError when the adapter's library is not installed.
    """
    job = read_job(stage / JOB_FILE)
    assert isinstance(job.settings, SFTSettings | RLSettings)
    lora = job.settings.lora
    # A checkpoint of an adapter holds no other weights. Any checkpoint of a full training overwrites all of them.
    finished = lora is None and (stage / MANIFEST_FILE).is_file()
    causal_lm = load_causal_lm((stage if finished else inputs_of(job, stage)["model"]) / _MODEL, dtype)
    adapter = None if lora is None else Adapter(causal_lm, lora, seed=0)
    stored = PieceReader(checkpoint / "policy")
    for name, parameter in PolicyModel(causal_lm, temperature=1.0, chunk_tokens=1).named_parameters():
        if parameter.requires_grad:
            stored.read(PieceKey("weight", 0, name), parameter.detach().view(-1))
    weights = own_weights(causal_lm) if adapter is None else adapter.merged_weights()
    write_model_folder(causal_lm, {weight.name: weight.value() for weight in weights}, folder)
    if adapter is not None:
        adapter.save({factor.name: factor.value() for factor in adapter.factors()}, folder / ADAPTER_FOLDER)
    copy_tokenizer(tokenizer, folder)

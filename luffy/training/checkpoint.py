"""Atomic checkpoints that can be loaded with another number of ranks or ZeRO stage, and their export as a model folder.

`checkpoints/step_000040/` holds a folder for each engine (`policy/`, `critic/`) into which every rank writes its share,
`reference/` where the reference follows the policy (rank 0 writes it, since every rank holds all of it),
`state.json` (the state of the stage: replay buffer, controllers), `layout.json` (ranks and ZeRO stage) and, written
last, `COMPLETE`. An older checkpoint is deleted only after a newer one is complete. A checkpoint with the file `EXTRA`
is off the schedule: it was written because the stage had to end, and is deleted after the next one is complete.

ZeRO keeps float32 weights and Adam's moments in flat tensors that are partitioned by stage and rank. Here each rank's
part is described as pieces of named parameters, so that it can be loaded into another layout. Buffers and frozen
parameters stay in the model folder. Each rank writes a few safetensors files of pieces, and any rank can read any range
of elements. An entry `exp_avg/96/decoder.norm.weight` is a flat piece of that parameter's `exp_avg` that starts at
element 96; the header holds the parameter's shape.
"""

import itertools
import json
import logging
import math
import os
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import deepspeed
import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from luffy.config.model import DType
from luffy.config.settings import RLSettings, SFTSettings
from luffy.errors import CheckpointError, ConfigError
from luffy.files import sync_directory, write_atomic
from luffy.pipeline.job import JOB_FILE, inputs_of, read_job
from luffy.pipeline.manifest import MANIFEST_FILE
from luffy.pipeline.reuse import CHECKPOINTS_FOLDER, COMPLETE_FILE, complete_checkpoints
from luffy.training.model_folder import copy_tokenizer, load_causal_lm, own_weights, write_model_folder
from luffy.training.policy_model import ADAPTER_FOLDER, Adapter, PolicyModel

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


Shapes = Mapping[str, tuple[int, ...]]

_FILE_BYTES = 2**30
"""Size at which a file is closed, which bounds the data that a rank copies from its GPU at a time."""
_SHAPES = "shapes"
_WHOLE = "whole"


@dataclass(frozen=True, slots=True)
class PieceKey:
    """Start of a piece: `kind` (such as `exp_avg`) of the parameter `name`, from element `start`."""

    kind: str
    start: int
    name: str


def write_pieces(
    folder: Path, rank: int, shapes: Shapes, pieces: Iterable[tuple[PieceKey, Tensor]], file_bytes: int = _FILE_BYTES
) -> None:
    """Write the pieces of this rank, synced to disk, into `folder`, which all ranks share; pieces must not overlap."""

    left = iter(pieces)
    for number in itertools.count():
        written: dict[str, Tensor] = {}
        held: dict[str, tuple[int, ...]] = {}
        size_bytes = 0
        for key, tensor in left:
            written[f"{key.kind}/{key.start}/{key.name}"] = tensor.detach().to("cpu").flatten()
            held[key.name] = shapes[key.name]
            size_bytes += tensor.nbytes
            if size_bytes >= file_bytes:
                break
        if not written:
            return
        path = folder / f"rank_{rank:04d}_{number:04d}.safetensors"
        save_file(written, path, {_SHAPES: json.dumps(held)})
        with path.open("rb") as file:
            os.fsync(file.fileno())


def write_whole(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write whole tensors by name, synced to disk, into `folder`, which nothing else is written to."""
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    write_pieces(folder, 0, shapes, ((PieceKey(_WHOLE, 0, name), tensor) for name, tensor in tensors.items()))


def read_whole(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Fill the tensors from what `write_whole` wrote; CheckpointError when it wrote others, or a file is broken."""
    stored = PieceReader(folder)
    stored.check({name: tuple(tensor.shape) for name, tensor in tensors.items()})
    for name, tensor in tensors.items():
        stored.read(PieceKey(_WHOLE, 0, name), tensor.view(-1))


class PieceReader:
    """Reads elements from the files of all ranks in a folder, and only those that are requested.

    Raises CheckpointError when a file is broken.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._pieces: dict[tuple[str, str], list[tuple[safe_open, str, int, int]]] = defaultdict(list)
        """File, entry, start and end of each piece, by kind and name."""
        self.shapes: dict[str, tuple[int, ...]] = {}
        for path in sorted(folder.glob("*.safetensors")):
            try:
                file = safe_open(path, "pt")
                shapes: dict[str, list[int]] = json.loads(file.metadata()[_SHAPES])
                self.shapes |= {name: tuple(shape) for name, shape in shapes.items()}
                for entry in file.keys():  # noqa: SIM118 - not a dictionary
                    kind, start, name = entry.split("/", 2)
                    (numel,) = file.get_slice(entry).get_shape()
                    self._pieces[kind, name].append((file, entry, int(start), int(start) + numel))
            except SafetensorError as error:
                raise CheckpointError(
                    f"{path} is broken ({error}); delete {folder.parent} to resume earlier"
                ) from error

    def check(self, shapes: Shapes) -> None:
        """Raise CheckpointError unless the folder holds parameters of these names and shapes."""
        if self.shapes != shapes:
            raise CheckpointError(
                f"{self._folder} does not hold the parameters of this run's model; delete {self._folder.parent} to "
                "resume earlier"
            )

    def has(self, kind: str, name: str) -> bool:
        return (kind, name) in self._pieces

    def read(self, key: PieceKey, into: Tensor) -> None:
        """Fill the flat `into` with the elements from `key.start` on, from any number of pieces.

        Raises CheckpointError when elements are missing.
        """
        end, num_found = key.start + into.numel(), 0
        for file, entry, first, last in self._pieces.get((key.kind, key.name), ()):
            low, high = max(key.start, first), min(end, last)
            if low < high:
                into[low - key.start : high - key.start].copy_(file.get_slice(entry)[low - first : high - first])
                num_found += high - low
        if num_found != into.numel():
            raise CheckpointError(
                f"{self._folder} holds {num_found} of the {into.numel()} elements of {key.kind} of "
                f"{key.name}; delete {self._folder.parent} to resume from an older one"
            )


_WEIGHT, _STEP = "weight", "step"
_MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, slots=True)
class _Piece:
    """The elements of a parameter that this rank's optimizer updates."""

    name: str
    start: int
    numel: int
    flat: Tensor
    """The optimizer's tensor that holds them: flat, with many parameters; at stage 0 the parameter itself."""
    offset: int
    """Index of the first element in `flat`."""

    def of(self, tensor: Tensor) -> Tensor:
        """A flat view of these elements in a tensor with the layout of `flat`."""
        return tensor.detach().view(-1).narrow(0, self.offset, self.numel)

    def key(self, kind: str) -> PieceKey:
        return PieceKey(kind, self.start, self.name)


def write_engine(engine: deepspeed.DeepSpeedEngine, folder: Path) -> None:
    """Write this rank's share of the engine's state into `folder`; not a collective call."""
    # At stage 0 every rank has the full state.
    if engine.zero_optimization_stage() or dist.get_rank() == 0:
        shapes = {name: _shape(parameter) for name, parameter in _trained(engine)}
        write_pieces(folder, dist.get_rank(), shapes, _tensors(engine))


def read_engine(engine: deepspeed.DeepSpeedEngine, folder: Path) -> None:
    """Load this rank's share of the engine's state from `folder`; call `publish` next. Not a collective call.

    Raises CheckpointError when `folder` belongs to another model, or when something in it is missing or broken.
    """
    stored = PieceReader(folder)
    stored.check({name: _shape(parameter) for name, parameter in _trained(engine)})
    by_flat: dict[Tensor, list[_Piece]] = {}
    for piece in _pieces(engine):
        by_flat.setdefault(piece.flat, []).append(piece)
    for flat, pieces in by_flat.items():
        _read(stored, flat, pieces, _adamw(engine))


def publish(engine: deepspeed.DeepSpeedEngine) -> None:
    """Copy the optimizer's weights into the model after `read_engine`; a collective call."""
    optimizer = engine.optimizer
    match engine.zero_optimization_stage():
        case 1 | 2:
            optimizer.update_lp_params()
        case 3:
            optimizer.checkpoint_event_prologue()  # releases the gathered old weights
            for group in range(len(optimizer.fp16_groups)):
                optimizer._reassign_or_swap_out_partitioned_parameters(group)
            optimizer.checkpoint_event_epilogue()  # gathers the small parameters that stay unsharded


def _read(stored: PieceReader, flat: Tensor, pieces: list[_Piece], adamw: torch.optim.Optimizer) -> None:
    steps = []
    for piece in pieces:
        stored.read(piece.key(_WEIGHT), piece.of(piece.flat))
        if stored.has(_STEP, piece.name):
            steps.append(torch.zeros(1))
            stored.read(PieceKey(_STEP, 0, piece.name), steps[-1])
    if not steps:  # saved before the first step: Adam has no state yet
        adamw.state.pop(flat, None)
        return
    state = adamw.state[flat]
    # AdamW keeps its count of steps beside the parameter for its fused kernel, on the CPU otherwise.
    state[_STEP] = torch.cat(steps).max().to(flat.device if adamw.defaults["fused"] else torch.device("cpu"))
    for moment in _MOMENTS:
        if moment not in state:
            state[moment] = torch.zeros_like(flat, requires_grad=False)
        for piece in pieces:
            # A parameter that never had a gradient has no moments at stage 0; at other stages they are 0.
            if stored.has(moment, piece.name):
                stored.read(piece.key(moment), piece.of(state[moment]))
            else:
                piece.of(state[moment]).zero_()


def _tensors(engine: deepspeed.DeepSpeedEngine) -> Iterator[tuple[PieceKey, Tensor]]:
    for piece in _pieces(engine):
        yield piece.key(_WEIGHT), piece.of(piece.flat)
        state = _adamw(engine).state.get(piece.flat)
        if state:
            for moment in _MOMENTS:
                yield piece.key(moment), piece.of(state[moment])
            if piece.start == 0:
                yield piece.key(_STEP), state[_STEP].clone()  # shared by all parameters of a flat tensor


def _pieces(engine: deepspeed.DeepSpeedEngine) -> Iterator[_Piece]:
    """The pieces of this rank, in the order of the module's parameters."""
    stage, optimizer = engine.zero_optimization_stage(), engine.optimizer
    for name, parameter in _trained(engine):
        if stage == 0:
            yield _Piece(name, 0, parameter.numel(), parameter, 0)
        elif stage < 3:  # the parameters of a group are concatenated, and the result is partitioned over the ranks
            mapping = getattr(parameter, "_hp_mapping", None)
            if mapping is not None:
                (flat,) = _adamw(engine).param_groups[mapping.param_group_index]["params"]
                inside, within = mapping.lp_fragment_address, mapping.hp_fragment_address
                yield _Piece(name, inside.start, inside.numel, flat, within.start)
        else:  # every parameter is partitioned over the ranks, with padding at the end
            group, offset, share = optimizer.grad_position[optimizer.get_param_id(parameter)]
            start = dist.get_rank() * share
            numel = min(share, math.prod(_shape(parameter)) - start)
            if numel > 0:
                yield _Piece(name, start, numel, optimizer.fp32_partitioned_groups_flat[group], offset)


def _adamw(engine: deepspeed.DeepSpeedEngine) -> torch.optim.Optimizer:
    return engine.optimizer.optimizer if engine.zero_optimization_stage() else engine.optimizer


def _trained(engine: deepspeed.DeepSpeedEngine) -> Iterator[tuple[str, nn.Parameter]]:
    return ((name, parameter) for name, parameter in engine.module.named_parameters() if parameter.requires_grad)


def _shape(parameter: nn.Parameter) -> tuple[int, ...]:
    return tuple(getattr(parameter, "ds_shape", parameter.shape))  # a parameter partitioned by ZeRO 3 is empty

"""State of a DeepSpeed engine as pieces of named parameters, independent of ZeRO stage and number of ranks.

ZeRO keeps float32 weights and Adam's moments in flat tensors that are partitioned by stage and rank. Here each rank's
part is described in terms of parameters, so that it can be loaded into another layout. Buffers and frozen parameters do
not change in training and stay in the model folder.

Each rank writes its own files of pieces, and any rank can read any range of elements. A folder holds a few safetensors
files per rank. An entry `exp_avg/96/decoder.norm.weight` is a flat piece of that parameter's `exp_avg` that starts at
element 96; the header holds the parameter's shape.
"""

import json
import math
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from luffy.errors import CheckpointError

Shapes = Mapping[str, tuple[int, ...]]
"""Shapes of parameters by name."""

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

    def portions() -> Iterator[dict[PieceKey, Tensor]]:
        pending: dict[PieceKey, Tensor] = {}
        size_bytes = 0
        for key, tensor in pieces:
            pending[key] = tensor.detach().to("cpu").flatten()
            size_bytes += tensor.nbytes
            if size_bytes >= file_bytes:
                yield pending
                pending, size_bytes = {}, 0
        if pending:
            yield pending

    for number, pending in enumerate(portions()):
        path = folder / f"rank_{rank:04d}_{number:04d}.safetensors"
        written = {f"{key.kind}/{key.start}/{key.name}": tensor for key, tensor in pending.items()}
        save_file(written, path, {_SHAPES: json.dumps({key.name: shapes[key.name] for key in pending})})
        with path.open("rb") as file:
            os.fsync(file.fileno())


def write_whole(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write whole tensors by name, synced to disk, into `folder`, which nothing else is written to."""
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    write_pieces(folder, 0, shapes, ((PieceKey(_WHOLE, 0, name), tensor) for name, tensor in tensors.items()))


def read_whole(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Fill the tensors from what `write_whole` wrote; CheckpointError when it wrote others, or a file is broken."""
    stored = PieceReader(folder)
    if stored.shapes != {name: tuple(tensor.shape) for name, tensor in tensors.items()}:
        raise CheckpointError(
            f"{folder} does not hold the parameters of this run's model; delete {folder.parent} to resume earlier"
        )
    for name, tensor in tensors.items():
        stored.read(PieceKey(_WHOLE, 0, name), tensor.view(-1))


class PieceReader:
    """Reads elements from the files of all ranks in a folder, and only those that are requested.

    Raises CheckpointError when a file is broken.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._pieces: dict[tuple[str, str], list[_StoredPiece]] = defaultdict(list)
        self.shapes: dict[str, tuple[int, ...]] = {}
        for path in sorted(folder.glob("*.safetensors")):
            try:
                file = safe_open(path, "pt")
                shapes: dict[str, list[int]] = json.loads(file.metadata()[_SHAPES])
                self.shapes |= {name: tuple(shape) for name, shape in shapes.items()}
                for entry in file.keys():  # noqa: SIM118 - not a dictionary
                    kind, start, name = entry.split("/", 2)
                    (numel,) = file.get_slice(entry).get_shape()
                    self._pieces[kind, name].append(_StoredPiece(file, entry, int(start), int(start) + numel))
            except SafetensorError as error:
                raise CheckpointError(
                    f"{path} is broken ({error}); delete {folder.parent} to resume earlier"
                ) from error

    def has(self, kind: str, name: str) -> bool:
        """Whether the files hold `kind` for the parameter `name`."""
        return (kind, name) in self._pieces

    def read(self, key: PieceKey, into: Tensor) -> None:
        """Fill the flat `into` with the elements from `key.start` on, from any number of pieces.

        Raises CheckpointError when elements are missing.
        """
        end, num_found = key.start + into.numel(), 0
        for piece in self._pieces.get((key.kind, key.name), ()):
            low, high = max(key.start, piece.start), min(end, piece.end)
            if low < high:
                found = piece.file.get_slice(piece.entry)[low - piece.start : high - piece.start]
                into[low - key.start : high - key.start].copy_(found)
                num_found += high - low
        if num_found != into.numel():
            raise CheckpointError(
                f"{self._folder} holds {num_found} of the {into.numel()} elements of {key.kind} of "
                f"{key.name}; delete {self._folder.parent} to resume from an older one"
            )


@dataclass(frozen=True, slots=True)
class _StoredPiece:
    file: safe_open
    entry: str
    start: int
    end: int


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
        write_pieces(folder, dist.get_rank(), _shapes(engine), _tensors(engine))


def read_engine(engine: deepspeed.DeepSpeedEngine, folder: Path) -> None:
    """Load this rank's share of the engine's state from `folder`; call `publish` next. Not a collective call.

    Raises CheckpointError when `folder` belongs to another model, or when something in it is missing or broken.
    """
    stored = PieceReader(folder)
    if stored.shapes != _shapes(engine):
        raise CheckpointError(
            f"{folder} does not hold the parameters of this run's model; delete {folder.parent} to resume earlier"
        )
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
    stage = engine.zero_optimization_stage()
    for name, parameter in _trained(engine):
        piece: _Piece | None = _Piece(name, 0, parameter.numel(), parameter, 0)
        if stage:
            piece = (_piece_of_parameter if stage == 3 else _piece_of_group)(engine, name, parameter)
        if piece is not None:
            yield piece


def _piece_of_group(engine: deepspeed.DeepSpeedEngine, name: str, parameter: nn.Parameter) -> _Piece | None:
    """ZeRO 1 and 2 concatenate the parameters of a group and partition the result over the ranks."""
    mapping = getattr(parameter, "_hp_mapping", None)
    if mapping is None:
        return None
    (flat,) = _adamw(engine).param_groups[mapping.param_group_index]["params"]
    inside, within = mapping.lp_fragment_address, mapping.hp_fragment_address
    return _Piece(name, inside.start, inside.numel, flat, within.start)


def _piece_of_parameter(engine: deepspeed.DeepSpeedEngine, name: str, parameter: nn.Parameter) -> _Piece | None:
    """ZeRO 3 partitions every parameter over the ranks, with padding at the end."""
    optimizer = engine.optimizer
    group, offset, share = optimizer.grad_position[optimizer.get_param_id(parameter)]
    start = dist.get_rank() * share
    numel = min(share, math.prod(_shape(parameter)) - start)
    if numel <= 0:
        return None
    return _Piece(name, start, numel, optimizer.fp32_partitioned_groups_flat[group], offset)


def _adamw(engine: deepspeed.DeepSpeedEngine) -> torch.optim.Optimizer:
    return engine.optimizer.optimizer if engine.zero_optimization_stage() else engine.optimizer


def _trained(engine: deepspeed.DeepSpeedEngine) -> Iterator[tuple[str, nn.Parameter]]:
    return ((name, parameter) for name, parameter in engine.module.named_parameters() if parameter.requires_grad)


def _shapes(engine: deepspeed.DeepSpeedEngine) -> dict[str, tuple[int, ...]]:
    return {name: _shape(parameter) for name, parameter in _trained(engine)}


def _shape(parameter: nn.Parameter) -> tuple[int, ...]:
    return tuple(getattr(parameter, "ds_shape", parameter.shape))  # a parameter partitioned by ZeRO 3 is empty

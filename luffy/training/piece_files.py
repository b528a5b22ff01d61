"""Files of tensor pieces: each rank writes its own, and any rank can read any range of elements.

A folder holds a few safetensors files per rank. An entry `exp_avg/96/decoder.norm.weight` is a flat piece of that
parameter's `exp_avg` that starts at element 96; the header holds the parameter's shape.
"""

import json
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

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
    for number, pending in enumerate(_portions(pieces, file_bytes)):
        _write(folder / f"rank_{rank:04d}_{number:04d}.safetensors", shapes, pending)


def _portions(pieces: Iterable[tuple[PieceKey, Tensor]], file_bytes: int) -> Iterator[dict[PieceKey, Tensor]]:
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


def _write(path: Path, shapes: Shapes, pieces: Mapping[PieceKey, Tensor]) -> None:
    written = {f"{key.kind}/{key.start}/{key.name}": tensor for key, tensor in pieces.items()}
    of_these = {key.name: shapes[key.name] for key in pieces}
    save_file(written, path, {_SHAPES: json.dumps(of_these)})
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
                self._list(safe_open(path, "pt"))
            except SafetensorError as error:
                raise CheckpointError(
                    f"{path} is broken ({error}); delete {folder.parent} to resume earlier"
                ) from error

    def _list(self, file: safe_open) -> None:
        shapes: dict[str, list[int]] = json.loads(file.metadata()[_SHAPES])
        self.shapes |= {name: tuple(shape) for name, shape in shapes.items()}
        for entry in file.keys():  # noqa: SIM118 - not a dictionary
            kind, start, name = entry.split("/", 2)
            (numel,) = file.get_slice(entry).get_shape()
            self._pieces[kind, name].append(_StoredPiece(file, entry, int(start), int(start) + numel))

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

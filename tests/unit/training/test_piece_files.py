"""Pieces in files: whatever way they were cut, any other cut reads the same numbers."""

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from luffy.errors import CheckpointError
from luffy.training.engine_state import PieceKey, PieceReader, write_pieces

NUMEL = 24
CUTS = st.sets(st.integers(1, NUMEL - 1)).map(lambda inner: [0, *sorted(inner), NUMEL])


def _write(folder: Path, cuts: list[int], ranks: int, file_bytes: int = 50) -> torch.Tensor:
    whole = torch.arange(float(NUMEL))
    pieces = [(PieceKey("weight", low, "a/b.c"), whole[low:high]) for low, high in pairwise(cuts)]
    for rank in range(ranks):
        write_pieces(folder, rank, {"a/b.c": (4, 6), "other": (1,)}, pieces[rank::ranks], file_bytes)
    return whole


@settings(deadline=None, max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(written=CUTS, read=CUTS, ranks=st.integers(1, 3))
def test_any_cut_is_read_by_any_other(written: list[int], read: list[int], ranks: int, tmp_path: Path) -> None:
    for path in tmp_path.iterdir():
        path.unlink()
    whole = _write(tmp_path, written, ranks)
    stored = PieceReader(tmp_path)
    assert stored.shapes == {"a/b.c": (4, 6)}
    for low, high in pairwise(read):
        into = torch.full((high - low,), torch.nan)
        stored.read(PieceKey("weight", low, "a/b.c"), into)
        assert torch.equal(into, whole[low:high])


def test_a_rank_writes_several_files_so_that_it_copies_little_at_a_time(tmp_path: Path) -> None:
    _write(tmp_path, [0, 6, 12, 18, 24], ranks=1, file_bytes=40)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "rank_0000_0000.safetensors",
        "rank_0000_0001.safetensors",
    ]


def test_elements_that_are_nowhere_are_missed(tmp_path: Path) -> None:
    _write(tmp_path, [0, 6, 24], ranks=2)
    (tmp_path / "rank_0001_0000.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"holds 4 of the 8 elements of weight of a/b.c; delete"):
        PieceReader(tmp_path).read(PieceKey("weight", 2, "a/b.c"), torch.empty(8))
    assert not PieceReader(tmp_path).has("step", "a/b.c")

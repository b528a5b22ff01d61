"""The lengths that a bench gives its responses."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from luffy.costs.response_lengths import Pace, read_pace, shuffled, spread_lengths, write_pace


@given(limit=st.integers(8, 4096), share=st.floats(0.05, 0.98), count=st.integers(64, 400))
def test_lengths_have_the_mean_that_is_asked_for_within_their_limit(limit: int, share: float, count: int) -> None:
    lengths = spread_lengths(count, share * limit, limit)
    assert len(lengths) == count
    assert min(lengths) >= 1 and max(lengths) <= limit
    assert sum(lengths) / count == pytest.approx(share * limit, rel=0.05, abs=1.0)


def test_a_mean_at_the_limit_or_above_it_gives_the_limit() -> None:
    assert spread_lengths(4, 100.0, 64) == spread_lengths(4, 64.0, 64) == [64] * 4


def test_a_seed_decides_the_order_and_nothing_is_lost() -> None:
    lengths = list(range(50))
    assert shuffled(lengths, 1) == shuffled(lengths, 1) != shuffled(lengths, 2)
    assert sorted(shuffled(lengths, 1)) == lengths


def test_a_pace_survives_its_file(tmp_path: Path) -> None:
    pace = Pace("mean", "40 tokens on average", 40.0)
    write_pace(tmp_path, pace)
    assert read_pace(tmp_path) == pace

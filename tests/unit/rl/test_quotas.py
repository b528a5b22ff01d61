"""Quotas: whole numbers as near to their shares as can be, in every step and over many."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from luffy.rl.prompts import available_quotas, quotas, step_offset

_WEIGHTS = st.lists(st.floats(0.01, 10.0), min_size=1, max_size=6)


@given(weights=_WEIGHTS, count=st.integers(0, 200), step=st.integers(1, 1000), seed=st.integers(0, 99))
def test_every_part_is_within_one_of_its_share(weights: list[float], count: int, step: int, seed: int) -> None:
    found = quotas(weights, count, step_offset(seed, "test", step))
    assert sum(found) == count
    for part, weight in zip(found, weights, strict=True):
        assert abs(part - count * weight / sum(weights)) < 1 + 1e-6


def test_a_share_that_is_a_whole_number_is_that_in_every_step() -> None:
    assert {tuple(quotas([0.3, 0.6, 0.1], 30, step_offset(1, "test", step))) for step in range(500)} == {(9, 18, 3)}


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_over_many_steps_the_shares_are_exact(seed: int) -> None:
    """Far below what chance would leave: after 400 steps of 8, 13 of a standard deviation."""
    totals = [0, 0, 0]
    for step in range(1, 401):
        totals = [
            a + b for a, b in zip(totals, quotas([0.55, 0.33, 0.12], 8, step_offset(seed, "t", step)), strict=True)
        ]
        for total, weight in zip(totals, [0.55, 0.33, 0.12], strict=True):
            assert abs(total - step * 8 * weight) < 3


@given(
    sizes=st.lists(st.integers(0, 12), min_size=4, max_size=4),
    shares=st.lists(st.sampled_from([0.0, 0.2, 1.0, 3.0]), min_size=4, max_size=4),
    count=st.integers(0, 40),
    offset=st.floats(0, 0.999),
)
def test_what_a_part_lacks_comes_from_the_others(
    sizes: list[int], shares: list[float], count: int, offset: float
) -> None:
    size = dict(zip("abcd", sizes, strict=True))
    share = dict(zip("abcd", shares, strict=True))
    found = available_quotas(share, size, count, offset)
    assert sum(found.values()) == min(count, sum(sizes))
    assert all(found[name] <= size[name] for name in size)
    wanted = sum(size[name] for name in size if share[name] > 0)
    assert sum(found[name] for name in size if share[name] == 0) == max(0, min(count, sum(sizes)) - wanted)

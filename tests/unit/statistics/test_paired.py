"""Comparison of two models: Holm's correction, the bootstrap, and where it gives way to the closed form."""

from collections import Counter
from fractions import Fraction
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from luffy.statistics.accuracy import paired_difference
from luffy.statistics.paired import (
    BOOTSTRAP_DRAWS,
    PairedAccuracies,
    bootstrap_means,
    changed_problems,
    compare,
    compare_paired,
    holm,
    supporting_problems,
)


@pytest.mark.parametrize(
    ("p_values", "adjusted"),
    [
        # By hand: .005 x 4, .01 x 3, .03 x 2, and .04 x 1, which the one before it raises to .06.
        ([0.01, 0.04, 0.03, 0.005], [0.03, 0.06, 0.06, 0.02]),
        ([0.02, 0.02], [0.04, 0.04]),
        ([0.4, 0.6, 0.9], [1.0, 1.0, 1.0]),
        ([0.03], [0.03]),
        ([], []),
    ],
)
def test_holms_correction_by_hand(p_values: list[float], adjusted: list[float]) -> None:
    assert holm(p_values) == pytest.approx(adjusted)


@given(st.lists(st.floats(0, 1), max_size=12))
def test_holm_keeps_the_order_and_lies_between_no_correction_and_bonferronis(p_values: list[float]) -> None:
    adjusted = holm(p_values)
    for p, q in zip(p_values, adjusted, strict=True):
        assert p <= q <= min(1.0, p * len(p_values)) + 1e-12
    assert [q for _, q in sorted(zip(p_values, adjusted, strict=True))] == sorted(adjusted)


def test_holm_refuses_what_is_no_p_value() -> None:
    with pytest.raises(ValueError, match=r"\[0, 1\]"):
        holm([0.2, 1.2])


def test_bootstrap_means_are_those_of_all_resamples() -> None:
    values = [-1.0, 0.0, 0.0, 2.0]
    every = Counter(Fraction(int(sum(drawn)), 4) for drawn in product(values, repeat=4))
    drawn = Counter(Fraction(mean).limit_denominator(4) for mean in bootstrap_means(np.array(values)).tolist())
    assert drawn.keys() <= every.keys()
    for mean, ways in every.items():
        assert drawn[mean] / BOOTSTRAP_DRAWS == pytest.approx(ways / 4**4, abs=0.02)


def test_a_bootstrapped_difference_is_near_the_normal_interval_and_the_same_every_time() -> None:
    first, second = [0.0] * 90 + [1.0] * 210, [1.0] * 90 + [0.0] * 40 + [1.0] * 170
    result = compare_paired(first, second, 1, 0.95)
    error = np.std(np.subtract(second, first)) / np.sqrt(300)
    assert result.difference.method == "paired bootstrap"
    assert (result.wins, result.losses, result.ties) == (90, 40, 170)
    assert result.difference.value == pytest.approx(50 / 300)
    assert result.difference.interval == pytest.approx((50 / 300 - 1.96 * error, 50 / 300 + 1.96 * error), abs=0.01)
    assert result.p_value == pytest.approx(2 / (BOOTSTRAP_DRAWS + 1))  # none of the draws reaches 0
    assert compare_paired(first, second, 1, 0.95) == result


def test_resamples_without_a_difference_count_on_both_sides_whatever_the_unit() -> None:
    """A sum of fifths that is 0 must not become 1e-17."""
    solved = [(3, 2)] * 12 + [(4, 3)] * 10 + [(1, 0)] * 8 + [(2, 3)] * 9 + [(0, 1)] * 9 + [(2, 2)] * 30
    fifths, eighths = (
        compare_paired([second / k for _, second in solved], [first / k for first, _ in solved], k, 0.95)
        for k in (5, 8)
    )
    assert fifths.difference.method == "paired bootstrap"
    assert fifths.p_value == eighths.p_value


def test_few_changed_problems_are_left_to_the_closed_form() -> None:
    first, second = [0.0] * 5 + [1.0] * 295, [1.0] * 5 + [1.0] * 295
    assert compare_paired(first, second, 1, 0.95) == paired_difference(first, second, 0.95)
    assert compare_paired(first, first, 1, 0.95).p_value == 1.0


def test_a_few_large_changes_among_small_ones_count_as_few() -> None:
    assert changed_problems(np.array([1.0] * 7 + [-1.0] * 3 + [0.0] * 90)) == pytest.approx(10)
    assert changed_problems(np.array([1.0] * 4 + [1 / 32] * 200)) < 5
    assert changed_problems(np.zeros(3)) == 0


@given(st.integers(0, 60), st.integers(0, 60), st.sampled_from([0.8, 0.9, 0.95, 0.99]))
@settings(max_examples=60, deadline=None)
def test_the_p_value_is_below_the_level_just_where_the_interval_excludes_no_difference(wins, losses, confidence):
    first, second = [0.0] * wins + [1.0] * (losses + 10), [1.0] * wins + [0.0] * losses + [1.0] * 10
    result = compare_paired(first, second, 1, confidence)
    assert 0 < result.p_value <= 1
    assert result.is_clear == (result.p_value < 1 - confidence)
    assert result.difference.low <= result.difference.value <= result.difference.high


@pytest.mark.parametrize(("n", "k", "gain"), [(30, 1, 0.0), (30, 32, 0.03), (200, 1, 0.03), (200, 8, 0.0)])
def test_intervals_of_differences_hold_the_truth(n: int, k: int, gain: float) -> None:
    rng = np.random.default_rng([n, k])
    held = 0
    for _ in range(300):
        chance = rng.beta(0.5, 0.5, n)
        first = rng.binomial(k, chance) / k
        second = rng.binomial(k, chance + 2 * gain * (1 - chance)) / k  # mean chance 1/2
        result = compare_paired(first.tolist(), second.tolist(), k, 0.95).difference
        held += result.low <= gain <= result.high
    assert held / 300 >= 0.93 - 0.03  # two standard errors of 300 sets


@pytest.mark.parametrize(
    ("n", "k", "solved"), [(40, 1, 0.97), (50, 1, 0.98), (100, 1, 0.99), (100, 1, 0.8), (200, 1, 0.995), (50, 4, 0.97)]
)
def test_intervals_of_large_gains_hold_the_truth(n: int, k: int, solved: float) -> None:
    rng = np.random.default_rng([n, k, round(1000 * solved)])
    held = 0
    for _ in range(300):
        # Each problem is either always solved or never: samples of one problem agree.
        second = (rng.random(n) < solved).astype(float)
        result = compare_paired([0.0] * n, second.tolist(), k, 0.95).difference
        held += result.low <= solved <= result.high
    assert held / 300 >= 0.93 - 0.03  # two standard errors of 300 sets


@pytest.mark.parametrize(("n", "gain"), [(50, 1.0), (100, 0.25), (60, 1 / 3)])
def test_problems_that_all_change_alike_leave_the_interval_a_width(n: int, gain: float) -> None:
    first = [0.0, 1 / 3] * (n // 2) if gain == 1 / 3 else [0.0] * n
    result = compare_paired(first, [value + gain for value in first], 4, 0.95)
    assert result.difference.method == "Bonett-Price"
    assert result.difference.low < gain - 0.005
    assert result.is_clear


def test_most_problems_changing_alike_support_less_than_they_are() -> None:
    assert supporting_problems(np.array([1.0] * 95 + [0.0] * 5)) == pytest.approx(5)
    assert supporting_problems(np.array([0.0] * 95 + [1.0] * 5)) == pytest.approx(5)
    assert supporting_problems(np.array([1.0] * 50 + [0.0] * 50)) == pytest.approx(50)
    assert supporting_problems(np.array([0.25] * 90)) == 0


def sides(n: int, wins: int, losses: int) -> PairedAccuracies:
    first = [0.0] * wins + [1.0] * (n - wins)
    return PairedAccuracies(first, [1.0] * (n - losses) + [0.0] * losses, 1)


def test_a_difference_that_stands_alone_falls_to_the_correction_over_nine_benchmarks() -> None:
    alone = compare({"one": sides(100, 14, 3)}, 0.95)
    among = compare({"one": sides(100, 14, 3)} | {f"other {i}": sides(100, 5, 5) for i in range(8)}, 0.95)
    assert alone.on("one").is_significant
    assert among.on("one").paired.is_clear
    assert not among.on("one").is_significant
    assert among.on("one").adjusted_p == pytest.approx(9 * among.on("one").paired.p_value)


def test_a_large_difference_stands_among_nine() -> None:
    among = compare({"one": sides(100, 30, 2)} | {f"other {i}": sides(100, 5, 5) for i in range(8)}, 0.95)
    assert [row.is_significant for row in among.benchmarks] == [True] + [False] * 8
    with pytest.raises(KeyError):
        among.on("two")


def test_both_sides_need_the_same_problems() -> None:
    with pytest.raises(ValueError, match="same problems"):
        compare_paired([1.0], [1.0, 0.0], 1, 0.95)

"""Intervals: closed values, invariants, and coverage."""

import math
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from luffy.evaluation.statistics import (
    accuracy,
    effective_samples,
    paired_difference,
    pass_at_k,
    wilson_interval,
)

counts = st.integers(1, 8).flatmap(
    lambda k: st.tuples(st.just(k), st.lists(st.integers(0, k), min_size=1, max_size=40))
)


@pytest.mark.parametrize(
    ("correct", "expected"),
    [
        # R. G. Newcombe, Stat. Med. 17 (1998), table I, method 3.
        ((81, 263), (0.2553, 0.3662)),
        ((15, 148), (0.0624, 0.1605)),
        ((0, 20), (0.0, 0.1611)),
        ((1, 29), (0.0061, 0.1718)),
    ],
)
def test_one_sample_a_problem_gives_wilsons_interval(correct: tuple[int, int], expected: tuple[float, float]) -> None:
    solved, n = correct
    estimate = accuracy([1] * solved + [0] * (n - solved), 1, 0.95)
    assert estimate.interval == pytest.approx(expected, abs=6e-5)


@given(counts, st.floats(0.5, 0.999))
def test_an_interval_holds_its_accuracy_stays_in_range_and_never_collapses(
    case: tuple[int, list[int]], confidence: float
) -> None:
    k, correct = case
    estimate = accuracy(correct, k, confidence)
    assert 0 <= estimate.low <= estimate.value <= estimate.high <= 1
    assert estimate.high - estimate.low > 0


@given(counts)
def test_responses_are_worth_at_least_one_trial_a_problem_and_at_most_all_of_them(case: tuple[int, list[int]]) -> None:
    k, correct = case
    assert len(correct) - 1e-9 <= effective_samples(correct, k) <= len(correct) * k + 1e-9


def test_samples_that_always_agree_add_nothing() -> None:
    once, eight_times = accuracy([1] * 30 + [0] * 70, 1, 0.95), accuracy([8] * 30 + [0] * 70, 8, 0.95)
    assert eight_times.interval == pytest.approx(once.interval, abs=1e-12)


def test_samples_that_differ_narrow_the_interval() -> None:
    once, four_times = accuracy([1] * 50 + [0] * 50, 1, 0.95), accuracy([2] * 100, 4, 0.95)
    assert four_times.high - four_times.low < 0.6 * (once.high - once.low)


@pytest.mark.parametrize("correct", [[0], [4], [2]])
def test_one_problem_says_little_however_often_it_is_sampled(correct: list[int]) -> None:
    estimate = accuracy(correct, 4, 0.95)
    assert estimate.high - estimate.low > 0.6


def test_all_wrong_with_many_samples_is_no_surer_than_with_one() -> None:
    assert accuracy([0] * 20, 8, 0.95) == accuracy([0] * 20, 1, 0.95)


@pytest.mark.parametrize(("correct", "k"), [([], 1), ([2], 1), ([-1], 1)])
def test_impossible_counts_are_refused(correct: list[int], k: int) -> None:
    with pytest.raises(ValueError, match=r"problem"):
        accuracy(correct, k, 0.95)


def test_wilson_covers_on_average_and_dips_only_where_it_is_known_to() -> None:
    # Exact: the probability of all outcomes whose interval holds p (Brown, Cai, DasGupta 2001 show the dips).
    coverage = {}
    for n in (10, 30, 100):
        intervals = [wilson_interval(c / n, n, 0.95) for c in range(n + 1)]
        for p in np.linspace(0.02, 0.98, 97):
            chances = [math.comb(n, c) * p**c * (1 - p) ** (n - c) for c in range(n + 1)]
            held = (chance for chance, (low, high) in zip(chances, intervals, strict=True) if low <= p <= high)
            coverage[n, p] = sum(held)
    assert np.mean(list(coverage.values())) > 0.945
    assert min(coverage.values()) > 0.83
    assert min(value for (n, p), value in coverage.items() if n * min(p, 1 - p) >= 5) > 0.92


def cases() -> Iterator[tuple[int, int, float, float]]:
    """n, k, accuracy and the share of its variance that lies between problems (0: all alike, 1: solved or not)."""
    for n, k in ((10, 4), (10, 8), (30, 4), (30, 8), (100, 4)):
        for p in (0.1, 0.3, 0.7, 0.95):
            for agreement in (0.0, 0.3, 0.9):
                if n * min(p, 1 - p) >= 1:
                    yield n, k, p, agreement


def draw_chances(rng: np.random.Generator, p: float, agreement: float, shape: tuple[int, int]) -> np.ndarray:
    if agreement == 0:
        return np.full(shape, p)
    concentration = 1 / agreement - 1
    return rng.beta(p * concentration, (1 - p) * concentration, shape)


@pytest.mark.parametrize(("n", "k", "p", "agreement"), list(cases()))
def test_intervals_over_problems_hold_the_truth_as_often_as_they_say(
    n: int, k: int, p: float, agreement: float
) -> None:
    rng = np.random.default_rng([n, k, int(100 * p), int(10 * agreement)])
    correct_RP = rng.binomial(k, draw_chances(rng, p, agreement, (800, n)))
    estimates = [accuracy(correct_P.tolist(), k, 0.95) for correct_P in correct_RP]
    coverage = np.mean([estimate.low <= p <= estimate.high for estimate in estimates])
    assert coverage >= 0.93 - 0.015  # two standard errors of 800 draws


@pytest.mark.parametrize(("p", "gain"), [(0.1, 0.0), (0.1, 0.3), (0.5, 0.2), (0.9, 0.05)])
@pytest.mark.parametrize(("n", "k"), [(10, 1), (30, 4), (100, 1)])
def test_paired_intervals_hold_the_truth_as_often_as_they_say(n: int, k: int, p: float, gain: float) -> None:
    rng = np.random.default_rng([n, k, int(100 * p), int(100 * gain)])
    before = rng.binomial(k, draw_chances(rng, p, 0.5, (800, n))) / k
    after = rng.binomial(k, draw_chances(rng, p + gain, 0.5, (800, n))) / k
    differences = [
        paired_difference(a.tolist(), b.tolist(), 0.95).difference for a, b in zip(before, after, strict=True)
    ]
    assert np.mean([estimate.low <= gain <= estimate.high for estimate in differences]) >= 0.93 - 0.015


def test_a_paired_difference_is_bonett_and_prices_interval() -> None:
    # 40 problems, 7 won and 2 lost: centre 5/42, variance (8 + 3)/42 - (5/42)^2.
    second = [1.0] * 7 + [0.0] * 2 + [1.0] * 31
    first = [0.0] * 7 + [1.0] * 2 + [1.0] * 31
    result = paired_difference(first, second, 0.95)
    half = 1.959964 * math.sqrt((11 / 42 - (5 / 42) ** 2) / 42)
    assert (result.wins, result.ties, result.losses) == (7, 31, 2)
    assert result.difference.value == pytest.approx(5 / 40)
    assert result.difference.interval == pytest.approx((5 / 42 - half, 5 / 42 + half), abs=1e-6)


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=30))
def test_a_paired_difference_never_collapses_and_turns_its_sign_with_its_sides(
    pairs: list[tuple[float, float]],
) -> None:
    first, second = [a for a, _ in pairs], [b for _, b in pairs]
    there, back = paired_difference(first, second, 0.95), paired_difference(second, first, 0.95)
    assert -1 <= there.difference.low <= there.difference.value <= there.difference.high <= 1
    assert there.difference.high > there.difference.low
    assert there.difference.low == pytest.approx(-back.difference.high)
    assert (there.wins, there.losses) == (back.losses, back.wins)


def test_no_change_is_never_clear() -> None:
    assert not paired_difference([1.0] * 500, [1.0] * 500, 0.95).is_clear


def test_paired_needs_the_same_problems() -> None:
    with pytest.raises(ValueError, match="same problems"):
        paired_difference([1.0], [1.0, 0.0], 0.95)


def test_pass_at_k_equals_the_share_of_all_draws_with_a_correct_one() -> None:
    # 5 samples, 2 correct, 3 drawn: 10 draws, one of which misses both.
    assert pass_at_k([2], 5, 3) == pytest.approx(1 - 1 / 10)
    assert pass_at_k([2, 0], 5, 1) == pytest.approx(0.2)
    assert pass_at_k([1, 0], 4, 4) == pytest.approx(0.5)


def test_pass_at_k_refuses_more_than_there_are() -> None:
    with pytest.raises(ValueError, match="pass@8 needs at least 8"):
        pass_at_k([1], 4, 8)

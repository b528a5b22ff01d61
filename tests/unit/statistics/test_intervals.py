"""Intervals of a share: published values, their definition, invariants, and a part of the grid of coverage."""

import csv
import math
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from luffy.statistics.intervals import (
    blaker_interval,
    clustered_wilson,
    design_effect,
    student_p,
    student_quantile,
    verdict_interval,
    wilson_interval,
)

ACCURACIES = [round(0.05 * step, 2) for step in range(1, 20)]


@pytest.mark.parametrize(
    ("solved", "n", "expected"),
    [
        # R. G. Newcombe, Stat. Med. 17 (1998), table I, method 3.
        (81, 263, (0.2553, 0.3662)),
        (15, 148, (0.0624, 0.1605)),
        (0, 20, (0.0, 0.1611)),
        (1, 29, (0.0061, 0.1718)),
    ],
)
def test_wilsons_interval_is_the_published_one(solved: int, n: int, expected: tuple[float, float]) -> None:
    assert wilson_interval(solved / n, n, 0.95) == pytest.approx(expected, abs=6e-5)


def acceptability(solved: int, n: int, share_X: np.ndarray) -> np.ndarray:
    """Blaker's, with half the probability of the count itself, by the definition."""
    count_C = np.arange(n + 1)[:, None]
    chance_CX = np.array([[math.comb(n, c)] for c in range(n + 1)]) * share_X**count_C * (1 - share_X) ** (n - count_C)
    up_to_CX, from_CX = chance_CX.cumsum(axis=0), chance_CX[::-1].cumsum(axis=0)[::-1]
    tail_CX = np.minimum(up_to_CX, from_CX) - chance_CX / 2
    thinner_CX = tail_CX <= tail_CX[solved] * (1 + 1e-9)
    return (chance_CX * thinner_CX).sum(axis=0) - chance_CX[solved] / 2


@pytest.mark.parametrize(("solved", "n"), [(0, 5), (1, 5), (3, 10), (10, 10), (4, 30), (17, 40), (1, 22), (8, 50)])
@pytest.mark.parametrize("confidence", [0.8, 0.95, 0.99])
def test_blakers_interval_ends_at_the_last_acceptable_shares(solved: int, n: int, confidence: float) -> None:
    low, high = blaker_interval(solved, n, confidence)
    just_inside = np.array([low + 1e-9] * (solved > 0) + [high - 1e-9] * (solved < n))
    share_X = np.linspace(0, 1, 10_001)
    beyond = share_X[(share_X < low) | (share_X > high)]
    assert (acceptability(solved, n, just_inside) > 1 - confidence).all()
    assert (acceptability(solved, n, beyond) <= 1 - confidence).all()


def test_an_acceptable_region_apart_from_the_others_is_part_of_the_interval() -> None:
    share_X = np.array([0.280, 0.2856, 0.2857])
    assert (acceptability(8, 50, share_X) > 0.05).tolist() == [False, True, False]
    assert blaker_interval(8, 50, 0.95)[1] == pytest.approx(0.28561, abs=1e-5)


@pytest.mark.parametrize(("solved", "n"), [(14, 40), (20, 54), (27, 70)])
def test_a_share_at_which_two_counts_are_equally_likely_is_inside(solved: int, n: int) -> None:
    assert (acceptability(solved, n, np.array([0.4999, 0.5, 0.5001])) > 0.05).tolist() == [True, True, False]
    assert 0.5 <= blaker_interval(solved, n, 0.95)[1] == pytest.approx(0.5, abs=1e-11)


@given(st.integers(1, 60).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))), st.floats(0.5, 0.99))
@settings(max_examples=40)
def test_blakers_interval_holds_the_share_and_turns_with_the_verdicts(case: tuple[int, int], confidence: float) -> None:
    solved, n = case
    low, high = blaker_interval(solved, n, confidence)
    assert 0 <= low <= solved / n <= high <= 1
    assert high - low > 0.1 / n
    assert blaker_interval(n - solved, n, confidence) == pytest.approx((1 - high, 1 - low), abs=1e-11)


def test_more_correct_verdicts_raise_both_ends() -> None:
    ends = [blaker_interval(c, 30, 0.95) for c in range(31)]
    assert all(a[0] < b[0] and a[1] < b[1] for a, b in pairwise(ends[1:-1]))


def coverage(n: int, share: float) -> float:
    """Exact: the probability of all counts whose interval holds the share."""
    held = 0.0
    for c in range(n + 1):
        interval = verdict_interval(c, n, 0.95)
        if interval.low <= share <= interval.high:
            held += math.comb(n, c) * share**c * (1 - share) ** (n - c)
    return held


@pytest.mark.parametrize("n", [30, 100, 250])
def test_one_verdict_a_problem_covers_93_to_97_percent(n: int) -> None:
    found = [coverage(n, share) for share in ACCURACIES]
    assert min(found) >= 0.93
    assert max(found) <= 0.97


def test_where_the_jumps_of_a_count_leave_that_range_is_known() -> None:
    found = {share: coverage(54, share) for share in ACCURACIES}
    assert {share for share, held in found.items() if not 0.93 <= held <= 0.97} == {0.05, 0.95}
    assert found[0.05] == pytest.approx(0.982, abs=1e-3)


@pytest.mark.parametrize("n", [5, 10, 20])
def test_few_verdicts_cover_on_average_and_never_collapse(n: int) -> None:
    found = [coverage(n, share) for share in np.linspace(0.02, 0.98, 97)]
    assert np.mean(found) > 0.945
    assert min(found) > 0.88


def draw(rng: np.random.Generator, shape: str, mean: float, size: tuple[int, int]) -> np.ndarray:
    if shape == "0 or .9":
        low, high = (0.0, 0.9) if mean < 0.5 else (0.1, 1.0)
        return np.where(rng.random(size) < (mean - low) / (high - low), high, low)
    total = 1 / float(shape) - 1
    return rng.beta(mean * total, (1 - mean) * total, size)


@pytest.mark.parametrize("shape", ["0.05", "0.2", "0.5", "0.8", "0 or .9"])
@pytest.mark.parametrize(("n", "accuracy"), [(30, 0.1), (30, 0.5), (30, 0.8), (100, 0.05), (100, 0.6)])
def test_many_samples_a_problem_cover_93_to_97_percent(shape: str, n: int, accuracy: float) -> None:
    rng = np.random.default_rng([n, round(100 * accuracy)])
    share_RP = rng.binomial(32, draw(rng, shape, accuracy, (2000, n))) / 32
    low_R, high_R = clustered_wilson(share_RP, 32, 0.95)
    covered = np.mean((low_R <= accuracy) & (accuracy <= high_R))
    assert 0.93 - 0.01 <= covered <= 0.97 + 0.01  # two standard errors of 2,000 sets


@pytest.mark.parametrize("shape", ["0.2", "0.5", "0.8"])
def test_a_verdict_that_rests_on_few_problems_widens_the_interval(shape: str) -> None:
    rng = np.random.default_rng(5)
    share_RP = rng.binomial(32, draw(rng, shape, 0.05, (2000, 30))) / 32
    low_R, high_R = clustered_wilson(share_RP, 32, 0.95)
    # Without that, the estimated design effect alone gives 91, 87 and 87 %.
    assert 0.93 <= np.mean((low_R <= 0.05) & (high_R >= 0.05)) <= 0.97 + 0.01


@pytest.mark.parametrize("n", [5, 29, 30, 200])
def test_the_design_effect_lies_between_one_and_the_samples(n: int) -> None:
    rng = np.random.default_rng(n)
    share_RP = rng.binomial(8, rng.choice([0.0, 0.02, 0.3, 1.0], (500, n))) / 8
    effect_R = design_effect(share_RP, 8)
    assert effect_R.min() >= 1
    assert effect_R.max() <= 8


def test_the_design_effect_of_large_sets_is_the_ratio_of_variances():
    # Half the problems at 1/4, half at 3/4: variance 1/16 between, 1/4 in all; 1 + (k - 1) / 4 for k responses.
    rng = np.random.default_rng(0)
    share_RP = rng.binomial(16, rng.choice([0.25, 0.75], (50, 5000))) / 16
    assert design_effect(share_RP, 16).mean() == pytest.approx(1 + 15 / 4, rel=0.02)


def test_a_set_gets_the_same_interval_alone_and_among_others() -> None:
    share_RP = np.random.default_rng(1).integers(0, 9, (20, 35)) / 8
    together = np.array(clustered_wilson(share_RP, 8, 0.95)).T
    alone = [np.concatenate(clustered_wilson(share_RP[row : row + 1], 8, 0.95)) for row in range(20)]
    assert together == pytest.approx(np.array(alone), abs=1e-12)


@pytest.mark.parametrize(
    ("confidence", "freedom", "quantile"),
    [
        (0.95, 1, 12.7062),
        (0.95, 2, 4.3027),
        (0.95, 4, 2.7764),
        (0.99, 5, 4.0321),
        (0.95, 30, 2.0423),
        (0.9, 120, 1.6577),
    ],
)
def test_students_quantiles_are_those_of_the_tables(confidence: float, freedom: float, quantile: float) -> None:
    assert student_quantile(confidence, freedom) == pytest.approx(quantile, abs=1e-4)
    assert student_p(quantile, freedom) == pytest.approx(1 - confidence, rel=1e-4)


def test_students_distribution_in_closed_form_and_towards_the_normal_one() -> None:
    assert student_p(1.0, 1) == pytest.approx(0.5)  # Cauchy: 1 - 2 atan(1) / pi
    assert student_p(2.0, 2) == pytest.approx(1 - 2 / math.sqrt(6))  # 1 - t / sqrt(t^2 + 2)
    assert student_p(-1.5, 1e7) == pytest.approx(math.erfc(1.5 / math.sqrt(2)), rel=1e-5)
    assert student_p(0.0, 3) == 1.0
    assert student_quantile(0.95, math.inf) == pytest.approx(1.959964, abs=1e-6)


def test_the_published_coverage_is_that_of_these_intervals() -> None:
    file = Path("tests/campaigns/interval_coverage.csv")
    rows = [row for row in csv.DictReader(file.open()) if (row["what"], row["samples"]) == ("accuracy", "1")]
    for row in rows:
        if row["problems"] in ("30", "100"):
            found = coverage(int(row["problems"]), float(row["accuracy"]))
            assert found == pytest.approx(float(row["coverage"]), abs=6e-5)

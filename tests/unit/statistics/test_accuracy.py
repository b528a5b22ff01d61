"""Shares and accuracies with their intervals: published values, definitions, invariants, coverage; pass@k, maj@k, the
score adjusted for guessing."""

import csv
import math
from collections.abc import Callable
from itertools import combinations, pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from luffy.statistics.accuracy import accuracy, by_label, guess_adjusted, majority_at_k, pass_at_k
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
counts = st.integers(1, 8).flatmap(
    lambda k: st.tuples(st.just(k), st.lists(st.integers(0, k), min_size=1, max_size=40))
)


def test_wilsons_interval_is_the_published_one() -> None:
    """R. G. Newcombe, Stat. Med. 17 (1998), table I, method 3."""
    published = {
        (81, 263): (0.2553, 0.3662),
        (15, 148): (0.0624, 0.1605),
        (0, 20): (0, 0.1611),
        (1, 29): (0.0061, 0.1718),
    }
    for (solved, n), interval in published.items():
        assert wilson_interval(solved / n, n, 0.95) == pytest.approx(interval, abs=6e-5), (solved, n)


def acceptability(solved: int, n: int, share_X: np.ndarray) -> np.ndarray:
    """Blaker's, with half the probability of the count itself, by the definition."""
    count_C = np.arange(n + 1)[:, None]
    chance_CX = np.array([[math.comb(n, c)] for c in range(n + 1)]) * share_X**count_C * (1 - share_X) ** (n - count_C)
    up_to_CX, from_CX = chance_CX.cumsum(axis=0), chance_CX[::-1].cumsum(axis=0)[::-1]
    tail_CX = np.minimum(up_to_CX, from_CX) - chance_CX / 2
    thinner_CX = tail_CX <= tail_CX[solved] * (1 + 1e-9)
    return (chance_CX * thinner_CX).sum(axis=0) - chance_CX[solved] / 2


@pytest.mark.parametrize(("solved", "n"), [(0, 5), (1, 5), (3, 10), (10, 10), (4, 30), (17, 40), (1, 22), (8, 50)])
@pytest.mark.parametrize("confidence", [0.5, 0.8, 0.95, 0.99])
def test_blakers_interval_ends_at_the_last_acceptable_shares_and_turns_with_the_verdicts(solved, n, confidence) -> None:
    low, high = blaker_interval(solved, n, confidence)
    just_inside = np.array([low + 1e-9] * (solved > 0) + [high - 1e-9] * (solved < n))
    share_X = np.linspace(0, 1, 10_001)
    beyond = share_X[(share_X < low) | (share_X > high)]
    assert (acceptability(solved, n, just_inside) > 1 - confidence).all()
    assert (acceptability(solved, n, beyond) <= 1 - confidence).all()
    assert 0 <= low <= solved / n <= high <= 1
    assert high - low > 0.1 / n
    assert blaker_interval(n - solved, n, confidence) == pytest.approx((1 - high, 1 - low), abs=1e-11)


def test_apart_regions_and_shares_at_which_two_counts_are_equally_likely_are_inside() -> None:
    share_X = np.array([0.280, 0.2856, 0.2857])
    assert (acceptability(8, 50, share_X) > 0.05).tolist() == [False, True, False]
    assert blaker_interval(8, 50, 0.95)[1] == pytest.approx(0.28561, abs=1e-5)
    for solved, n in ((14, 40), (20, 54), (27, 70)):
        assert (acceptability(solved, n, np.array([0.4999, 0.5, 0.5001])) > 0.05).tolist() == [True, True, False]
        assert 0.5 <= blaker_interval(solved, n, 0.95)[1] == pytest.approx(0.5, abs=1e-11)


def test_more_correct_verdicts_raise_both_ends() -> None:
    ends = [blaker_interval(c, 30, 0.95) for c in range(31)]
    assert all(a[0] < b[0] and a[1] < b[1] for a, b in pairwise(ends[1:-1]))


def coverage(n: int, share: float) -> float:
    """Exact: the probability of all counts whose interval holds the share."""
    intervals = [verdict_interval(c, n, 0.95) for c in range(n + 1)]
    holding = [c for c, interval in enumerate(intervals) if interval.low <= share <= interval.high]
    return sum(math.comb(n, c) * share**c * (1 - share) ** (n - c) for c in holding)


@pytest.mark.parametrize(
    ("n", "shares", "least", "mean", "most"),
    [
        *((n, ACCURACIES, 0.93, 0.93, 0.97) for n in (30, 100, 250)),
        # Few verdicts cover on average and never collapse.
        *((n, np.linspace(0.02, 0.98, 97), 0.88, 0.945, 1.0) for n in (5, 10, 20)),
    ],
)
def test_one_verdict_a_problem_covers_as_much_as_it_says(n, shares, least, mean, most):
    found = [coverage(n, share) for share in shares]
    assert least <= min(found) <= max(found) <= most
    assert np.mean(found) > mean


def test_where_the_jumps_of_a_count_leave_that_range_is_known() -> None:
    found = {share: coverage(54, share) for share in ACCURACIES}
    assert {share for share, held in found.items() if not 0.93 <= held <= 0.97} == {0.05, 0.95}
    assert found[0.05] == pytest.approx(0.982, abs=1e-3)


def test_the_published_coverage_is_that_of_these_intervals() -> None:
    file = Path("tests/campaigns/interval_coverage.csv")
    rows = [row for row in csv.DictReader(file.open()) if (row["what"], row["samples"]) == ("accuracy", "1")]
    for row in rows:
        if row["problems"] in ("30", "100"):
            found = coverage(int(row["problems"]), float(row["accuracy"]))
            assert found == pytest.approx(float(row["coverage"]), abs=6e-5)


def draw(rng: np.random.Generator, shape: str, mean: float, size: tuple[int, int]) -> np.ndarray:
    """Chances of problems; `shape`: the share of an answer's variance that lies between them (0: all alike)."""
    if shape == "0":
        return np.full(size, mean)
    if shape == "0 or .9":
        low, high = (0.0, 0.9) if mean < 0.5 else (0.1, 1.0)
        return np.where(rng.random(size) < (mean - low) / (high - low), high, low)
    total = 1 / float(shape) - 1
    return rng.beta(mean * total, (1 - mean) * total, size)


@pytest.mark.parametrize(
    ("shape", "n", "accuracy"),
    [
        *((shape, *each) for shape in ("0.05", "0.2", "0.5", "0.8", "0 or .9")
          for each in ((30, 0.1), (30, 0.5), (30, 0.8), (100, 0.05), (100, 0.6))),
        # Verdicts that rest on few problems: the estimated design effect alone gives 91, 87 and 87 %.
        *((shape, 30, 0.05) for shape in ("0.2", "0.5", "0.8")),
    ],
)  # fmt: skip
def test_many_samples_a_problem_cover_93_to_97_percent(shape: str, n: int, accuracy: float) -> None:
    rng = np.random.default_rng([n, round(100 * accuracy)])
    share_RP = rng.binomial(32, draw(rng, shape, accuracy, (2000, n))) / 32
    low_R, high_R = clustered_wilson(share_RP, 32, 0.95)
    covered = np.mean((low_R <= accuracy) & (accuracy <= high_R))
    assert 0.93 - 0.01 <= covered <= 0.97 + 0.01  # two standard errors of 2,000 sets


SETS = [(10, 4), (10, 8), (30, 4), (30, 8), (100, 4)]


@pytest.mark.slow
@pytest.mark.parametrize("agreement", ["0", "0.3", "0.9"])
@pytest.mark.parametrize(
    ("n", "k", "p"), [(n, k, p) for n, k in SETS for p in (0.1, 0.3, 0.7, 0.95) if n * min(p, 1 - p) >= 1]
)
def test_intervals_over_problems_hold_the_truth_as_often_as_they_say(n: int, k: int, p: float, agreement: str) -> None:
    rng = np.random.default_rng([n, k, int(100 * p), int(10 * float(agreement))])
    correct_RP = rng.binomial(k, draw(rng, agreement, p, (800, n)))
    estimates = [accuracy(correct_P.tolist(), k, 0.95) for correct_P in correct_RP]
    held = np.mean([estimate.low <= p <= estimate.high for estimate in estimates])
    assert held >= 0.93 - 0.015  # two standard errors of 800 draws


@pytest.mark.parametrize("n", [1, 5, 29, 30, 200])
@pytest.mark.parametrize("k", [1, 2, 8])
def test_responses_are_worth_at_least_one_trial_a_problem_and_at_most_all_of_them(n: int, k: int) -> None:
    rng = np.random.default_rng(n)
    effect_R = design_effect(rng.binomial(k, rng.choice([0.0, 0.02, 0.3, 1.0], (500, n))) / k, k)
    assert 1 - 1e-9 <= effect_R.min() <= effect_R.max() <= k + 1e-9


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


def test_students_distribution_is_that_of_the_tables_in_closed_form_and_towards_the_normal_one() -> None:
    tables = {(0.95, 1): 12.7062, (0.95, 2): 4.3027, (0.95, 4): 2.7764, (0.99, 5): 4.0321, (0.95, 30): 2.0423}
    for (confidence, freedom), quantile in {**tables, (0.9, 120): 1.6577}.items():
        assert student_quantile(confidence, freedom) == pytest.approx(quantile, abs=1e-4)
        assert student_p(quantile, freedom) == pytest.approx(1 - confidence, rel=1e-4)
    assert student_p(1.0, 1) == pytest.approx(0.5)  # Cauchy: 1 - 2 atan(1) / pi
    assert student_p(2.0, 2) == pytest.approx(1 - 2 / math.sqrt(6))  # 1 - t / sqrt(t^2 + 2)
    assert student_p(-1.5, 1e7) == pytest.approx(math.erfc(1.5 / math.sqrt(2)), rel=1e-5)
    assert student_p(0.0, 3) == 1.0
    assert student_quantile(0.95, math.inf) == pytest.approx(1.959964, abs=1e-6)


def test_an_estimate_names_its_method_and_its_problems() -> None:
    for method, (right, others, correct, num_samples) in {
        "Blaker mid-p": (10, 20, 1, 1),
        "Blaker mid-p, all alike": (10, 20, 4, 4),
        "Wilson": (100, 100, 1, 1),
        "Wilson, clustered": (10, 20, 3, 4),
        "Wilson, clustered, few problems": (10, 10, 3, 4),
    }.items():
        estimate = accuracy([correct] * right + [0] * others, num_samples, 0.95)
        assert (estimate.method, estimate.num_problems) == (method.removesuffix(", all alike"), right + others)


@given(counts, st.floats(0.5, 0.999))
def test_an_interval_holds_its_accuracy_stays_in_range_and_never_collapses(case, confidence):
    k, correct = case
    estimate = accuracy(correct, k, confidence)
    assert 0 <= estimate.low <= estimate.value <= estimate.high <= 1
    assert estimate.high - estimate.low > 0


def test_samples_that_agree_add_nothing_and_those_that_differ_narrow_the_interval() -> None:
    once, eight_times = accuracy([1] * 30 + [0] * 70, 1, 0.95), accuracy([8] * 30 + [0] * 70, 8, 0.95)
    assert eight_times.interval == pytest.approx(once.interval, abs=1e-12)
    assert accuracy([0] * 20, 8, 0.95) == accuracy([0] * 20, 1, 0.95)
    once, four_times = accuracy([1] * 50 + [0] * 50, 1, 0.95), accuracy([2] * 100, 4, 0.95)
    assert four_times.high - four_times.low < 0.6 * (once.high - once.low)
    for solved in (0, 2, 4):  # one problem says little however often it is sampled
        alone = accuracy([solved], 4, 0.95)
        assert alone.high - alone.low > 0.6


@pytest.mark.parametrize("num_samples", [1, 2, 5, 7])
def test_pass_at_k_is_the_share_of_all_draws_with_a_correct_one(num_samples: int) -> None:
    for solved in range(num_samples + 1):
        verdicts = [True] * solved + [False] * (num_samples - solved)
        for k in range(1, num_samples + 1):
            draws = [any(draw) for draw in combinations(verdicts, k)]
            share = sum(draws) / len(draws)
            assert pass_at_k([solved], num_samples, k) == pytest.approx(share)
            assert pass_at_k([solved, 0, 0, 0], num_samples, k) == pytest.approx(share / 4)


@pytest.mark.parametrize(
    ("votes", "share"),
    [
        ([("7", True), ("7", True), ("8", False)], 1.0),
        ([("7", True), ("8", False), ("8", False)], 0.0),
        ([("7", True), ("8", False)], 1 / 2),
        ([("7", True), ("8", False), ("9", False)], 1 / 3),
        # Numbers and texts that say the same, and what was graded correct in two ways, vote together.
        ([("07.0", False), (" 7 ", False), ("8", True)], 0.0),
        ([("1/2", True), ("0.5", True), ("3", False)], 1.0),
        # One answer got two verdicts (a worker timed out): it is correct.
        ([("x+1", True), ("x + 1", False), ("3", False)], 1.0),
        # No answer never wins.
        ([("8", True), (None, False), (None, False)], 1.0),
        ([("9", False), (None, False), (None, False)], 0.0),
        ([(None, False), (None, False)], 0.0),
        # A verdict without an extracted answer (a judge's).
        ([(None, True), (None, True), ("9", False)], 1.0),
    ],
)
def test_the_most_frequent_answer_of_a_problem_counts(votes: list[tuple[str | None, bool]], share: float) -> None:
    assert majority_at_k([votes]) == pytest.approx(share)
    assert majority_at_k([votes, [("1", True)]]) == pytest.approx((share + 1) / 2)


@given(st.lists(st.tuples(st.sampled_from(["1", "2", "3"]), st.just(False)), min_size=1, max_size=9), st.randoms())
def test_the_order_of_votes_does_not_matter(votes: list[tuple[str, bool]], random) -> None:
    graded = [(answer, answer == "1") for answer, _ in votes]
    shuffled = random.sample(graded, len(graded))
    assert majority_at_k([graded]) == majority_at_k([shuffled])


def test_an_unparsed_item_counts_as_a_guess_among_its_own_options():
    # 4 options: one right of two, one unparsed: 1 + 1/4. 5 options: both unparsed: 2/5. 10 options: both right.
    assert guess_adjusted([1, 0, 2], [1, 2, 0], [4, 5, 10], 2) == pytest.approx((1.25 + 0.4 + 2) / 6)
    # Without an unparsed item it is the accuracy, as the majority is with one sample.
    assert guess_adjusted([1, 0, 1, 1], [0] * 4, [4] * 4, 1) == accuracy([1, 0, 1, 1], 1, 0.95).value
    assert majority_at_k([[("1", True)], [("2", False)], [(None, False)], [("3", True)]]) == 0.5


def test_accuracy_by_label_is_that_of_the_labels_problems() -> None:
    found = by_label(["b", "a", "b", "b"], [1, 0, 2, 2], 2, 0.9)
    assert list(found) == ["a", "b"]
    assert found["b"] == accuracy([1, 2, 2], 2, 0.9)
    assert {label: estimate.num_problems for label, estimate in found.items()} == {"a": 1, "b": 3}


@pytest.mark.parametrize(
    ("calculate", "said"),
    [
        *((lambda correct=correct: accuracy(correct, 1, 0.95), "problem") for correct in ([], [2], [-1])),
        *((lambda n=n: pass_at_k([1], n, 8), "pass@8 needs at least 8") for n in (1, 2, 5, 7)),
        *((lambda votes=votes: majority_at_k(votes), "at least one") for votes in ([], [[]])),
        (lambda: by_label(["a", "b"], [1], 1, 0.95), "2 labels of 1 problems"),
        (lambda: guess_adjusted([], [], [], 1), "problem"),
        (lambda: guess_adjusted([1], [1], [4], 1), "impossible"),
        (lambda: guess_adjusted([0], [-1], [4], 1), "impossible"),
        (lambda: guess_adjusted([0], [1], [0], 1), "impossible"),
        (lambda: guess_adjusted([0, 0], [1], [4], 1), "lengths"),
    ],
)
def test_impossible_counts_are_refused(calculate: Callable[[], object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        calculate()

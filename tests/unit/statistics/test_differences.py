"""Differences of two models over problems and seeds: Holm's correction, the bootstrap and where it gives way to the
closed form, by numbers worked out by hand and by simulation."""

import math
from collections import Counter
from collections.abc import Callable
from fractions import Fraction
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from luffy.statistics.accuracy import accuracy, paired_difference
from luffy.statistics.intervals import student_p, student_quantile
from luffy.statistics.over_seeds import seed_interval, seeded_accuracy, seeded_difference
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


def test_a_paired_difference_is_bonett_and_prices_interval():
    # 40 problems, 7 won and 2 lost: centre 5/42, variance (8 + 3)/42 - (5/42)^2.
    second = [1.0] * 7 + [0.0] * 2 + [1.0] * 31
    first = [0.0] * 7 + [1.0] * 2 + [1.0] * 31
    result = paired_difference(first, second, 0.95)
    half = 1.959964 * math.sqrt((11 / 42 - (5 / 42) ** 2) / 42)
    assert (result.wins, result.ties, result.losses) == (7, 31, 2)
    assert result.difference.value == pytest.approx(5 / 40)
    assert result.difference.interval == pytest.approx((5 / 42 - half, 5 / 42 + half), abs=1e-6)
    assert result.p_value == pytest.approx(0.1211, abs=1e-4)  # z = 1.5502


def test_imagined_problems_shrink_with_the_samples_that_make_an_accuracy():
    # 30 problems, each better or worse by 1/16: variance (30 + 16) / 256 / 32, since an imagined one counts 1/32.
    second, first = [0.5625, 0.5] * 15, [0.5, 0.5625] * 15
    result = paired_difference(first, second, 0.95, num_samples=32)
    half = 1.959964 * math.sqrt((30 / 256 + 2 / 32) / 32 / 32)
    assert result.difference.interval == pytest.approx((-half, half), abs=1e-6)


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=30))
def test_a_paired_difference_never_collapses_and_turns_its_sign_with_its_sides(pairs):
    first, second = [a for a, _ in pairs], [b for _, b in pairs]
    there, back = paired_difference(first, second, 0.95), paired_difference(second, first, 0.95)
    assert -1 <= there.difference.low <= there.difference.value <= there.difference.high <= 1
    assert there.difference.high > there.difference.low
    assert there.difference.low == pytest.approx(-back.difference.high)
    assert (there.wins, there.losses) == (back.losses, back.wins)
    assert there.is_clear == (there.p_value < 0.05)


def test_holms_correction_by_hand() -> None:
    # .005 x 4, .01 x 3, .03 x 2, and .04 x 1, which the one before it raises to .06.
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    for p_values, adjusted in (([0.02] * 2, [0.04] * 2), ([0.4, 0.6, 0.9], [1.0] * 3), ([0.03], [0.03]), ([], [])):
        assert holm(p_values) == pytest.approx(adjusted)


@given(st.lists(st.floats(0, 1), max_size=12))
def test_holm_keeps_the_order_and_lies_between_no_correction_and_bonferronis(p_values: list[float]) -> None:
    adjusted = holm(p_values)
    for p, q in zip(p_values, adjusted, strict=True):
        assert p <= q <= min(1.0, p * len(p_values)) + 1e-12
    assert [q for _, q in sorted(zip(p_values, adjusted, strict=True))] == sorted(adjusted)


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
    assert not paired_difference([1.0] * 500, [1.0] * 500, 0.95).is_clear


def test_few_large_changes_among_small_ones_and_few_that_differ_from_the_rest_count_as_few() -> None:
    assert changed_problems(np.array([1.0] * 7 + [-1.0] * 3 + [0.0] * 90)) == pytest.approx(10)
    assert changed_problems(np.array([1.0] * 4 + [1 / 32] * 200)) < 5
    assert changed_problems(np.zeros(3)) == 0
    assert supporting_problems(np.array([1.0] * 95 + [0.0] * 5)) == pytest.approx(5)
    assert supporting_problems(np.array([0.0] * 95 + [1.0] * 5)) == pytest.approx(5)
    assert supporting_problems(np.array([1.0] * 50 + [0.0] * 50)) == pytest.approx(50)
    assert supporting_problems(np.array([0.25] * 90)) == 0


@given(st.integers(0, 60), st.integers(0, 60), st.sampled_from([0.8, 0.9, 0.95, 0.99]))
@settings(max_examples=60, deadline=None)
def test_the_p_value_is_below_the_level_just_where_the_interval_excludes_no_difference(wins, losses, confidence):
    first, second = [0.0] * wins + [1.0] * (losses + 10), [1.0] * wins + [0.0] * losses + [1.0] * 10
    result = compare_paired(first, second, 1, confidence)
    assert 0 < result.p_value <= 1
    assert result.is_clear == (result.p_value < 1 - confidence)
    assert result.difference.low <= result.difference.value <= result.difference.high


@pytest.mark.slow
@pytest.mark.parametrize(
    ("n", "k", "gain", "from_nothing"),
    [
        *((30, k, gain, False) for k, gain in ((1, 0.0), (32, 0.03))),
        *((200, k, gain, False) for k, gain in ((1, 0.03), (8, 0.0))),
        # Each problem is either always solved or never: samples of one problem agree.
        *((n, 1, solved, True) for n, solved in ((40, 0.97), (50, 0.98), (100, 0.99), (100, 0.8), (200, 0.995))),
        (50, 4, 0.97, True),
    ],
)
def test_intervals_of_differences_hold_the_truth(n: int, k: int, gain: float, from_nothing: bool) -> None:
    rng = np.random.default_rng([n, k, round(1000 * gain)] if from_nothing else [n, k])
    held = 0
    for _ in range(300):
        first, second = np.zeros(n), (rng.random(n) < gain).astype(float)
        if not from_nothing:
            chance = rng.beta(0.5, 0.5, n)  # 1/2 on average
            first, second = (rng.binomial(k, each) / k for each in (chance, chance + 2 * gain * (1 - chance)))
        result = compare_paired(first.tolist(), second.tolist(), k, 0.95).difference
        held += result.low <= gain <= result.high
    assert held / 300 >= 0.93 - 0.03  # two standard errors of 300 sets


@pytest.mark.parametrize(("n", "gain"), [(50, 1.0), (100, 0.25), (60, 1 / 3)])
def test_problems_that_all_change_alike_leave_the_interval_a_width(n: int, gain: float) -> None:
    first = [0.0, 1 / 3] * (n // 2) if gain == 1 / 3 else [0.0] * n
    result = compare_paired(first, [value + gain for value in first], 4, 0.95)
    assert result.difference.method == "Bonett-Price"
    assert result.difference.low < gain - 0.005
    assert result.is_clear


def sides(n: int, wins: int, losses: int) -> PairedAccuracies:
    first = [0.0] * wins + [1.0] * (n - wins)
    return PairedAccuracies(first, [1.0] * (n - losses) + [0.0] * losses, 1)


def test_a_difference_that_stands_alone_falls_to_the_correction_over_nine_benchmarks_unless_it_is_large() -> None:
    others = {f"other {i}": sides(100, 5, 5) for i in range(8)}
    alone, among = (compare({"one": sides(100, 14, 3), **rest}, 0.95) for rest in ({}, others))
    assert alone.on("one").is_significant
    assert among.on("one").paired.is_clear
    assert not among.on("one").is_significant
    assert among.on("one").adjusted_p == pytest.approx(9 * among.on("one").paired.p_value)
    large = compare({"one": sides(100, 30, 2), **others}, 0.95)
    assert [row.is_significant for row in large.benchmarks] == [True] + [False] * 8
    with pytest.raises(KeyError):
        large.on("two")


def test_an_accuracy_over_seeds_by_hand():
    """Seeds at .5, .6 and .7 of 40 problems: sd .1, so t reaches 4.3027 x .1 / sqrt(3) = .2484 beside the problems'."""
    counts = [[1] * right + [0] * (40 - right) for right in (20, 24, 28)]
    found = seeded_accuracy(counts, 1, 0.95)
    problems = accuracy([sum(column) for column in zip(*counts, strict=True)], 3, 0.95)
    assert found.value == problems.value == pytest.approx(0.6)
    assert found.low == pytest.approx(0.6 - math.hypot(0.6 - problems.low, 0.24841), abs=1e-4)
    assert found.high == pytest.approx(0.6 + math.hypot(problems.high - 0.6, 0.24841), abs=1e-4)


def test_one_seed_speaks_of_problems_alone_and_nothing_right_leaves_room_above():
    one = [[1, 0, 1, 1] * 10]
    assert seeded_accuracy(one, 1, 0.95) == accuracy(one[0], 1, 0.95)
    nothing = seeded_accuracy([[0] * 50] * 3, 1, 0.95)
    assert nothing.low == 0.0 < nothing.high < 0.1


def test_a_difference_over_seeds_by_hand():
    """Two seeds, four problems, one sample.

    Differences by seed (1, 0, 0, 0) and (1, 1, 0, 0): means .25 and .5 of the seeds, 1, .5, 0, 0 of the problems, mean
    .375. Over seeds: sd^2 = .03125, / 2 = .015625. Over problems with two imagined ones, won and lost by 1/sqrt(2):
    n = 6, centre 1.5 / 6 = .25, (1 + .25 + 2 / 2) / 6 - .0625 = .3125, / 6 = .0520833. Sum .0677083, error .260208; t =
    1.44115; freedom .0677083^2 / (.015625^2 / 1 + .0520833^2 / 5) = 5.8264.
    """
    first = [[0, 0, 0, 0], [0, 0, 0, 0]]
    second = [[1, 0, 0, 0], [1, 1, 0, 0]]
    found = seeded_difference(first, second, 1, 0.95)
    assert (found.difference.value, found.by_seed, found.num_seeds) == (0.375, (0.25, 0.5), 2)
    assert found.p_value == pytest.approx(student_p(1.44115, 5.8264), rel=1e-4)
    half = student_quantile(0.95, 5.8264) * 0.260208
    assert found.difference.low == pytest.approx(0.375 - half, abs=1e-4)
    assert found.difference.high == pytest.approx(min(0.375 + half, 1.0), abs=1e-4)


def test_from_five_seeds_on_what_chance_leaves_counts_once():
    """Five seeds, four problems; the analysis of variance from its definition, in place of means of means."""
    second = np.array([[1, 0, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1], [1, 1, 0, 1], [0, 0, 0, 0]], dtype=float)
    mean, of_seed, of_problem = second.mean(), second.mean(axis=1), second.mean(axis=0)
    left = sum((second[s, p] - of_seed[s] - of_problem[p] + mean) ** 2 for s in range(5) for p in range(4)) / (4 * 3)
    seeds = 4 * sum((each - mean) ** 2 for each in of_seed) / 4
    imagined = [*of_problem, 1 / np.sqrt(5), -1 / np.sqrt(5)]
    problems = 20 * np.var(imagined) / 6
    assert seeds > left < problems
    variance = (seeds + problems - left) / 20
    freedom = (20 * variance) ** 2 / (seeds**2 / 4 + problems**2 / 5 + left**2 / 12)
    found = seeded_difference(np.zeros((5, 4)).tolist(), second.tolist(), 1, 0.95)
    assert found.p_value == pytest.approx(student_p(mean / np.sqrt(variance), freedom), rel=1e-9)
    assert found.difference.low == pytest.approx(mean - student_quantile(0.95, freedom) * np.sqrt(variance))


def test_five_seeds_that_differ_no_more_than_chance_leaves_add_nothing_to_the_problems():
    """Each seed gains on other problems, equally many: seeds are no reason for doubt, nor the problems."""
    second = [[float(p % 5 != s) for p in range(100)] for s in range(5)]
    found, once = (seeded_difference([[0.0] * 100] * len(rows), rows, 1, 0.95) for rows in (second, second[:1]))
    assert found.by_seed == (0.8,) * 5
    width, alone = (each.difference.high - each.difference.low for each in (found, once))
    assert width == pytest.approx(alone / np.sqrt(5), rel=0.1)


@pytest.mark.parametrize(("num_seeds", "num_problems"), [(3, 1), (4, 2), (5, 3)])
def test_seeds_and_problems_of_equal_degrees_of_freedom_both_count(num_seeds: int, num_problems: int):
    alike = seeded_difference([[0] * num_problems] * num_seeds, [[1] * num_problems] * num_seeds, 1, 0.95)
    assert 0 < alike.p_value < 1
    apart = [[1] * num_problems] * (num_seeds - 1) + [[0] * num_problems]
    assert seeded_difference([[0] * num_problems] * num_seeds, apart, 1, 0.95).p_value > alike.p_value


def test_the_interval_excludes_0_just_where_p_is_below_its_level():
    generator = np.random.default_rng(1)
    for _ in range(50):
        first = generator.random((3, 40)) < 0.5
        second = generator.random((3, 40)) < generator.uniform(0.3, 0.7)
        found = seeded_difference(first.astype(float).tolist(), second.astype(float).tolist(), 1, 0.9)
        estimate = found.difference
        assert (estimate.low > 0 or estimate.high < 0) == (found.p_value < 0.1)


def test_nothing_changed_is_no_evidence_a_big_change_in_every_seed_is_and_less_so_where_seeds_disagree():
    same = [[1.0, 0.0] * 20] * 3
    assert seeded_difference(same, same, 1, 0.95).p_value == 1.0
    found = seeded_difference([[0.0] * 60] * 3, [[1.0] * 45 + [0.0] * 15] * 3, 1, 0.95)
    assert found.p_value < 1e-6 and found.difference.low > 0.5
    agreeing, disagreeing = (
        [[1.0] * right + [0.0] * (40 - right) for right in each] for each in ((10,) * 3, (0, 10, 20))
    )
    sure, unsure = (seeded_difference([[0.0] * 40] * 3, second, 1, 0.95) for second in (agreeing, disagreeing))
    assert sure.difference.value == unsure.difference.value == 0.25
    assert sure.p_value < 0.01 < unsure.p_value


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [2, 3, 5])
@pytest.mark.parametrize("spread", [0.0, 0.04])
def test_the_intervals_hold_the_truth_at_least_as_often_as_they_say(seeds, spread):
    """No difference in truth; seeds differ by `spread`. 93.5 % leaves room for the noise of 600 draws (0.9 points)."""
    generator = np.random.default_rng([seeds, int(1000 * spread)])
    accurate = paired = 0
    for _ in range(600):
        chance_P = generator.beta(1.0, 1.0, 100)
        arms = [
            (generator.random((seeds, 100)) < chance_P + generator.normal(0, spread, (seeds, 1))).astype(int).tolist()
            for _ in range(2)
        ]
        estimate = seeded_accuracy(arms[0], 1, 0.95)
        accurate += estimate.low <= 0.5 <= estimate.high
        paired += seeded_difference(*arms, 1, 0.95).p_value >= 0.05
    assert accurate / 600 > 0.935
    assert paired / 600 > 0.935


def test_the_interval_over_seeds_is_that_of_students_t():
    values = [0.4, 0.5, 0.7]
    expected = stats.t.interval(0.9, 2, loc=np.mean(values), scale=stats.sem(values))
    assert seed_interval(values, 0.9) == pytest.approx(expected)
    assert seed_interval([0.0, 0.1], 0.95) == (0.0, pytest.approx(0.05 + 12.7062 * 0.05))


@pytest.mark.parametrize(
    ("calculate", "said"),
    [
        (lambda: paired_difference([1.0], [1.0, 0.0], 0.95), "same problems"),
        (lambda: compare_paired([1.0], [1.0, 0.0], 1, 0.95), "same problems"),
        (lambda: holm([0.2, 1.2]), r"\[0, 1\]"),
        (lambda: seeded_difference([[1.0]], [[1.0, 0.0]], 1, 0.95), "need the same"),
        (lambda: seeded_difference([], [], 1, 0.95), "need the same"),
        (lambda: seeded_difference([[1.0], [1.0, 0.0]], [[1.0], [1.0]], 1, 0.95), "need the same"),
        (lambda: seed_interval([0.5], 0.95), "two seeds"),
    ],
)
def test_what_cannot_be_compared_is_refused(calculate: Callable[[], object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        calculate()

"""Accuracies and tests over seeds and problems, by numbers worked out by hand and by simulation."""

import math

import numpy as np
import pytest
from scipy import stats

from luffy.statistics.accuracy import accuracy
from luffy.statistics.intervals import student_p, student_quantile
from luffy.statistics.over_seeds import seed_interval, seeded_accuracy, seeded_difference


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


def test_nothing_changed_is_no_evidence_and_a_big_change_in_every_seed_is():
    same = [[1.0, 0.0] * 20] * 3
    assert seeded_difference(same, same, 1, 0.95).p_value == 1.0
    found = seeded_difference([[0.0] * 60] * 3, [[1.0] * 45 + [0.0] * 15] * 3, 1, 0.95)
    assert found.p_value < 1e-6 and found.difference.low > 0.5


def test_the_same_difference_is_less_sure_where_seeds_disagree():
    first = [[0.0] * 40] * 3
    agreeing = [[1.0] * 10 + [0.0] * 30] * 3
    disagreeing = [[1.0] * right + [0.0] * (40 - right) for right in (0, 10, 20)]
    sure, unsure = (seeded_difference(first, second, 1, 0.95) for second in (agreeing, disagreeing))
    assert sure.difference.value == unsure.difference.value == 0.25
    assert sure.p_value < 0.01 < unsure.p_value


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


@pytest.mark.parametrize(
    ("first", "second"), [([[1.0]], [[1.0, 0.0]]), ([], []), ([[1.0], [1.0, 0.0]], [[1.0], [1.0]])]
)
def test_seeds_and_problems_must_be_the_same(first, second):
    with pytest.raises(ValueError, match="need the same"):
        seeded_difference(first, second, 1, 0.95)


def test_the_interval_over_seeds_is_that_of_students_t():
    values = [0.4, 0.5, 0.7]
    expected = stats.t.interval(0.9, 2, loc=np.mean(values), scale=stats.sem(values))
    assert seed_interval(values, 0.9) == pytest.approx(expected)
    assert seed_interval([0.0, 0.1], 0.95) == (0.0, pytest.approx(0.05 + 12.7062 * 0.05))
    with pytest.raises(ValueError, match="two seeds"):
        seed_interval([0.5], 0.95)

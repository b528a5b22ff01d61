"""Accuracies and differences with their intervals, pass@k, maj@k, the score adjusted for guessing."""

import math
from collections.abc import Iterator
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from luffy.statistics.accuracy import accuracy, by_label, guess_adjusted, majority_at_k, paired_difference, pass_at_k
from luffy.statistics.intervals import design_effect

counts = st.integers(1, 8).flatmap(
    lambda k: st.tuples(st.just(k), st.lists(st.integers(0, k), min_size=1, max_size=40))
)


@pytest.mark.parametrize(
    ("correct", "num_samples", "method"),
    [
        ([1] * 10 + [0] * 20, 1, "Blaker mid-p"),
        ([4] * 10 + [0] * 20, 4, "Blaker mid-p"),
        ([1] * 100 + [0] * 100, 1, "Wilson"),
        ([3] * 10 + [0] * 20, 4, "Wilson, clustered"),
        ([3] * 10 + [0] * 10, 4, "Wilson, clustered, few problems"),
    ],
)
def test_an_estimate_names_its_method_and_its_problems(correct: list[int], num_samples: int, method: str) -> None:
    estimate = accuracy(correct, num_samples, 0.95)
    assert (estimate.method, estimate.num_problems) == (method, len(correct))


@given(counts, st.floats(0.5, 0.999))
def test_an_interval_holds_its_accuracy_stays_in_range_and_never_collapses(case, confidence):
    k, correct = case
    estimate = accuracy(correct, k, confidence)
    assert 0 <= estimate.low <= estimate.value <= estimate.high <= 1
    assert estimate.high - estimate.low > 0


@given(counts)
def test_responses_are_worth_at_least_one_trial_a_problem_and_at_most_all_of_them(case: tuple[int, list[int]]) -> None:
    k, correct = case
    (effect,) = design_effect(np.asarray([correct]) / k, k)
    assert 1 - 1e-9 <= effect <= k + 1e-9


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


@pytest.mark.parametrize("correct", [[], [2], [-1]])
def test_impossible_counts_are_refused(correct: list[int]) -> None:
    with pytest.raises(ValueError, match=r"problem"):
        accuracy(correct, 1, 0.95)


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
def test_intervals_over_problems_hold_the_truth_as_often_as_they_say(n, k, p, agreement):
    rng = np.random.default_rng([n, k, int(100 * p), int(10 * agreement)])
    correct_RP = rng.binomial(k, draw_chances(rng, p, agreement, (800, n)))
    estimates = [accuracy(correct_P.tolist(), k, 0.95) for correct_P in correct_RP]
    coverage = np.mean([estimate.low <= p <= estimate.high for estimate in estimates])
    assert coverage >= 0.93 - 0.015  # two standard errors of 800 draws


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


def test_no_change_is_never_clear() -> None:
    assert not paired_difference([1.0] * 500, [1.0] * 500, 0.95).is_clear


def test_paired_needs_the_same_problems() -> None:
    with pytest.raises(ValueError, match="same problems"):
        paired_difference([1.0], [1.0, 0.0], 0.95)


@pytest.mark.parametrize("num_samples", [1, 2, 5, 7])
def test_pass_at_k_is_the_share_of_all_draws_with_a_correct_one(num_samples: int) -> None:
    for solved in range(num_samples + 1):
        verdicts = [True] * solved + [False] * (num_samples - solved)
        for k in range(1, num_samples + 1):
            draws = [any(draw) for draw in combinations(verdicts, k)]
            share = sum(draws) / len(draws)
            assert pass_at_k([solved], num_samples, k) == pytest.approx(share)
            assert pass_at_k([solved, 0, 0, 0], num_samples, k) == pytest.approx(share / 4)
    with pytest.raises(ValueError, match="pass@8 needs at least 8"):
        pass_at_k([1], num_samples, 8)


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


def test_with_one_sample_the_majority_is_the_accuracy() -> None:
    assert majority_at_k([[("1", True)], [("2", False)], [(None, False)], [("3", True)]]) == 0.5


@pytest.mark.parametrize("votes", [[], [[]]])
def test_no_votes_are_no_majority(votes: list[list[tuple[str | None, bool]]]) -> None:
    with pytest.raises(ValueError, match="at least one"):
        majority_at_k(votes)


def test_an_unparsed_item_counts_as_a_guess_among_its_own_options():
    # 4 options: one right of two, one unparsed: 1 + 1/4. 5 options: both unparsed: 2/5. 10 options: both right.
    assert guess_adjusted([1, 0, 2], [1, 2, 0], [4, 5, 10], 2) == pytest.approx((1.25 + 0.4 + 2) / 6)
    # Without an unparsed item it is the accuracy.
    assert guess_adjusted([1, 0, 1, 1], [0] * 4, [4] * 4, 1) == accuracy([1, 0, 1, 1], 1, 0.95).value


@pytest.mark.parametrize(
    ("correct", "unparsed", "options"),
    [([], [], []), ([1], [1], [4]), ([0], [-1], [4]), ([0], [1], [0]), ([0, 0], [1], [4])],
)
def test_impossible_guesses_are_refused(correct: list[int], unparsed: list[int], options: list[int]) -> None:
    with pytest.raises(ValueError, match=r"problem|impossible|lengths"):
        guess_adjusted(correct, unparsed, options, 1)


def test_accuracy_by_label_is_that_of_the_labels_problems() -> None:
    found = by_label(["b", "a", "b", "b"], [1, 0, 2, 2], 2, 0.9)
    assert list(found) == ["a", "b"]
    assert found["b"] == accuracy([1, 2, 2], 2, 0.9)
    assert {label: estimate.num_problems for label, estimate in found.items()} == {"a": 1, "b": 3}
    with pytest.raises(ValueError, match="2 labels of 1 problems"):
        by_label(["a", "b"], [1], 1, 0.95)

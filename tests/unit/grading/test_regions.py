"""Sets of real numbers, against membership point by point."""

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from luffy.grading.equivalence.regions import same_regions

_WRITINGS = ("(-\\infty,%d)\\cup(%d,\\infty)", "x<%d \\text{ or } x>%d", "\\{x \\mid x<%d \\text{ or } %d<x\\}")
_intervals = st.tuples(st.integers(-9, 9), st.integers(1, 9), st.booleans(), st.booleans()).map(
    lambda drawn: (drawn[0], drawn[0] + drawn[1], drawn[2], drawn[3])
)
Interval = tuple[int, int, bool, bool]


def written(low: int, high: int, left: bool, right: bool) -> str:
    return f"{'[' if left else '('}{low},{high}{']' if right else ')'}"


def as_inequality(low: int, high: int, left: bool, right: bool) -> str:
    below, above = (r"\le" if closed else "<" for closed in (left, right))
    return f"{low} {below} x {above} {high}"


def holds(interval: Interval, point: Fraction) -> bool:
    low, high, left, right = interval
    return low < point < high or (left and point == low) or (right and point == high)


@settings(deadline=None, max_examples=60)
@given(st.lists(_intervals, min_size=1, max_size=3), st.lists(_intervals, min_size=1, max_size=3))
def test_unions_of_the_same_points_are_equal(one: list[Interval], other: list[Interval]) -> None:
    points = [Fraction(number, 2) for number in range(-40, 41)]
    equal = all(any(holds(a, point) for a in one) == any(holds(b, point) for b in other) for point in points)
    left = "\\cup".join(written(*interval) for interval in one)
    right = " \\text{ or } ".join(as_inequality(*interval) for interval in other)
    assert same_regions(left, right) is equal


@pytest.mark.parametrize("left", _WRITINGS)
@pytest.mark.parametrize("right", _WRITINGS)
def test_one_set_in_several_notations(left: str, right: str) -> None:
    assert same_regions(left % (-1, 2), right % (-1, 2)) is True
    assert same_regions(left % (-1, 2), right % (-1, 3)) is False


@pytest.mark.parametrize(
    ("left", "right", "same"),
    [
        (r"\mathbb{R}\setminus\{0,1\}", r"(-\infty,0)\cup(0,1)\cup(1,\infty)", True),
        (r"\text{all real numbers except } 2", r"x \ne 2", True),
        (r"\mathbb{R}^{+}", r"(0,\infty)", True),
        (r"[\sqrt2, 3)", r"3 > x \ge 2^{1/2}", True),
        (r"\{n\in\mathbb{Z} : 1\le n\le 3\}", r"\{3,1,2\}", True),
        ("[a, 2a)", r"a \le x < a+a", True),
        # Not clearly sets.
        ("(2,3)", "(2,3)", None),
        ("2, 3", "x > 2", None),
        ("x > 2, x < 5", "(2,5)", None),
        ("x^2 > 4", r"x>2", None),
        ("e < 3", "x<3", None),
    ],
)
def test_equal_sets_are_told_from_texts_that_are_left_undecided(left: str, right: str, same: bool | None) -> None:
    assert same_regions(left, right) is same

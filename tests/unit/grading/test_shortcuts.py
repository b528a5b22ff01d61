"""Verdicts that need no worker."""

from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from luffy.grading.equivalence.certain import MAX_ANSWER_CHARS, settle
from luffy.types import Outcome

_numbers = st.from_regex(r"[+-]?(0{0,2}[0-9]{1,6}(\.[0-9]{0,6})?|\.[0-9]{1,6})", fullmatch=True)


@pytest.mark.parametrize(
    ("answer", "truth"),
    [
        ("28 percent", "28\\%"),
        ("07", "7"),
        ("52.0", "52"),
        ("-0", "0"),
        (".5", "0.50"),
        ("+3", "3"),
        ("$\\dfrac{1}{2}$", "\\frac{1}{2}"),
        ("6+9 i", "6+9i"),
        ("( 3, 4 )", "(3,4)"),
        ("\\text{C}", "C"),
        ("11.", "11"),
        ("32\\!348", "32348"),
    ],
)
def test_notations_of_one_value_are_equal(answer: str, truth: str) -> None:
    assert settle(answer, truth) is Outcome.CORRECT


@pytest.mark.parametrize(("answer", "truth"), [("57", "42"), ("-3", "3"), ("0.3333333", "0.333333"), ("1e9", "x")])
def test_different_plain_numbers_are_wrong(answer: str, truth: str) -> None:
    assert settle(answer, truth) is (Outcome.WRONG if "e" not in answer else None)


@pytest.mark.parametrize(
    ("answer", "truth"),
    [("1 1/2", "11/2"), ("1,234", "1234"), ("50\\%", "50"), ("\\sin x", "\\sinx"), ("x", "y"), ("", "."), ("٣", "3")],
)
def test_uncertain_pairs_are_left_to_a_worker(answer: str, truth: str) -> None:
    assert settle(answer, truth) is None


@given(_numbers, _numbers)
def test_plain_numbers_compare_as_decimals(answer: str, truth: str) -> None:
    equal = Decimal(answer.rstrip(".")) == Decimal(truth.rstrip("."))
    assert settle(answer, truth) is (Outcome.CORRECT if equal else Outcome.WRONG)


@pytest.mark.parametrize("bracket", ["()", "{}", "[]"])
def test_endless_nesting_is_unparsable(bracket: str) -> None:
    assert settle(bracket[0] * 101 + "1" + bracket[1] * 101, "x") is Outcome.UNPARSABLE


def test_an_endless_answer_is_unparsable_unless_it_is_the_reference() -> None:
    endless = "9" * (MAX_ANSWER_CHARS + 1)
    assert settle(endless, "1") is Outcome.UNPARSABLE
    assert settle(endless, endless) is Outcome.CORRECT

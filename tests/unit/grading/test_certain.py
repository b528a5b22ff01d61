"""Verdicts that need no worker, and what is not computed at all."""

from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.patience import PATIENCE_S

from luffy.grading.equivalence.certain import MAX_ANSWER_CHARS, refusal, settle
from luffy.grading.pool import GraderPool
from luffy.types import Outcome

_numbers = st.from_regex(r"[+-]?(0{0,2}[0-9]{1,6}(\.[0-9]{0,6})?|\.[0-9]{1,6})", fullmatch=True)


CERTAIN, OPEN = Outcome.CORRECT, None


@pytest.mark.parametrize(
    ("answer", "truth", "settled"),
    [
        ("28 percent", "28\\%", CERTAIN),
        ("07", "7", CERTAIN),
        ("52.0", "52", CERTAIN),
        ("-0", "0", CERTAIN),
        (".5", "0.50", CERTAIN),
        ("+3", "3", CERTAIN),
        ("$\\dfrac{1}{2}$", "\\frac{1}{2}", CERTAIN),
        ("6+9 i", "6+9i", CERTAIN),
        ("( 3, 4 )", "(3,4)", CERTAIN),
        ("\\text{C}", "C", CERTAIN),
        ("11.", "11", CERTAIN),
        ("32\\!348", "32348", CERTAIN),
        ("1 1/2", "11/2", OPEN),
        ("1,234", "1234", OPEN),
        ("50\\%", "50", OPEN),
        ("\\sin x", "\\sinx", OPEN),
        ("x", "y", OPEN),
        ("", ".", OPEN),
        ("٣", "3", OPEN),
    ],
)
def test_notations_of_one_value_are_equal_and_uncertain_pairs_are_left_to_a_worker(answer, truth, settled):
    assert settle(answer, truth) is settled


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


POWER, FACTORIAL = "a power too large to write out", "a factorial too large to write out"


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ("9^{9^{9^9}}", POWER),
        ("9^9^9^9", POWER),
        ("9**9**9**9", POWER),
        ("9^(9^(9^9))", POWER),
        (r"7^{7^{7^7}} \bmod 10", POWER),
        ("2^{10^9}", POWER),
        (r"\gcd(9^{9^9},7)", POWER),
        ("1000000000!", FACTORIAL),
        ("(10^9)!", FACTORIAL),
        ("((9!)!)!", FACTORIAL),
        ("9!!!", FACTORIAL),
        (r"\binom{10^9}{5\cdot 10^8}", "a binomial coefficient too large to write out"),
        (r"\sum_{k=1}^{10^9} k^k", "a sum or product with more than 10000 terms"),
        (r"\prod_{k=1}^{10000000} k", "a sum or product with more than 10000 terms"),
        ("x" + "9" * 1001, "a number with more than 1000 digits"),
        ("{" + ",".join(f"x_{{{n}}}" for n in range(200)) + "}", "a list with too many elements"),
        (r"\cup".join(f"({n},{n + 1})" for n in range(0, 200, 2)), "a list with too many elements"),
        (r"\begin{vmatrix}" + r"\\".join("&".join("abcdefgh") for _ in range(8)), "a determinant too large to expand"),
        ("x" * 5000, "longer than 4096 characters"),
        ("(" * 200, "nested deeper than 50"),
        *((answer, None) for answer in ["2^{2004}", "2^{2^{3}}", "(10^{10})^{10}", "1^{9^{9^9}}", "x^{2}", "e^{x^2}"]),
        *((answer, None) for answer in (r"\sum_{k=1}^{100} k", "10,000,000", "n! + 2^n", "9" * 1000)),
        *((answer, None) for answer in ("100!", "100!!", r"\frac{2008!}{3}", r"\binom{100000}{2}")),
        (r"\begin{pmatrix}1&0\\0&1\end{pmatrix}", None),
    ],
)
def test_answers_that_would_never_finish_are_refused_and_those_like_real_references_are_not(answer, reason):
    assert refusal(answer) == reason


def test_a_refused_answer_costs_no_worker_and_says_why() -> None:
    with GraderPool(1, PATIENCE_S) as pool:
        grade = pool.grade_one(r"\boxed{9^{9^{9^9}}}", "3")
        reference = pool.grade_one(r"\boxed{3}", "9^{9^{9^9}}")
        assert pool.grade_one(r"\boxed{9^{9^{9^9}}}", "9^{9^{9^9}}").outcome is Outcome.CORRECT
        assert pool.worker_pids() == []
    assert (grade.outcome, grade.reason) == (Outcome.UNPARSABLE, POWER)
    assert reference.reason == f"the reference: {POWER}"


@pytest.mark.parametrize(
    ("unit", "reason"),
    [
        ("9^", "a power too large"),
        ("9^{", "nested deeper"),
        ("9 ", None),
        (r"\binom{", "nested deeper"),
        (r"\sum_", None),
        ("!)", "a factorial too large"),
        ("1!", None),
        (",", "a list with too many elements"),
        ("&", None),
        (r"\sum", None),
    ],
)
def test_the_longest_answers_are_judged(unit: str, reason: str | None) -> None:
    found = refusal((unit * MAX_ANSWER_CHARS)[:MAX_ANSWER_CHARS])
    assert found is None if reason is None else found is not None and found.startswith(reason)

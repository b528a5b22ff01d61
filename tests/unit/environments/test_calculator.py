"""The calculator: exact against fractions, bounded against everything else."""

import operator
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from luffy.environments.calculator import calculator

OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}
NUMBERS = st.one_of(
    st.integers(0, 10**6).map(str), st.decimals(0, 1000, places=3, allow_nan=False).map(lambda value: f"{value:f}")
)


@pytest.mark.parametrize(
    ("expression", "result"),
    [
        ("1+1", "2"),
        ("0.1 + 0.2", "0.3"),
        ("(3 + 4.5) * 2", "15"),
        ("2**100", "1267650600228229401496703205376"),
        ("2**-3", "0.125"),
        ("-7 // 2", "-4"),
        ("7 % -3", "-2"),
        ("10 - -2", "12"),
        ("1e3", "1000"),
        ("5 ÷ 2 × 3 − 1", "6.5"),
        ("1/3", "0.333333333333 (rounded)"),
        ("-2/3", "-0.666666666667 (rounded)"),
        ("10**20 + 1/3", "1.00000000000e20 (rounded)"),
        ("99999999999999/10**13 + 1/10**40", "10 (rounded)"),
        ("10**100", "1.00000000000e100 (rounded)"),
        ("1/10**30", "1.00000000000e-30 (rounded)"),
        ("0**0", "1"),
    ],
)
def test_results_are_exact_where_they_are_short(expression, result):
    assert calculator(expression) == result


@st.composite
def expressions(draw, depth=4):
    """An expression, and its value by fractions; None where it divides by zero."""
    if depth == 0 or draw(st.booleans()):
        written = draw(NUMBERS)
        return written, Fraction(written)
    left, left_value = draw(expressions(depth=depth - 1))
    right, right_value = draw(expressions(depth=depth - 1))
    sign = draw(st.sampled_from(sorted(OPERATIONS)))
    known = left_value is not None and right_value is not None and (sign != "/" or right_value != 0)
    return f"({left} {sign} {right})", OPERATIONS[sign](left_value, right_value) if known else None


@given(expressions())
def test_every_expression_has_the_value_that_fractions_give_it(pair):
    expression, value = pair
    if value is None:
        with pytest.raises(ValueError, match="division by zero"):
            calculator(expression)
        return
    text = calculator(expression)
    shown = Fraction(text.removesuffix(" (rounded)"))
    assert shown == value or (text.endswith("(rounded)") and abs(shown - value) <= abs(value) / 10**11)


TOO_LARGE = ("9**9**9", "9**99999999", "2**4097", "(1/3)**9999", "1e9999999999", "9" * 1001, "9**999 * " * 100 + "1")
UNDEFINED = ("1/0", "1//0", "1 % 0", "0**-1", "2**0.5")
TOO_LONG = ("(" * 900, "(" * 400 + "1" + ")" * 400, "-" * 999 + "1", "1+" * 499 + "1")
NO_ARITHMETIC = (
    *("", "   ", "()", "1 +", "1 2", "(1)(2)", "1,2", "3 ^ 2", "e", "0x10", "1_000", "1j", "1 if 1 else 2"),
    *("__import__('os').system('true')", "[1][0]", "1\x00", "\ud800", "１"),
)


@pytest.mark.parametrize("expression", [*TOO_LARGE, *UNDEFINED, *TOO_LONG, *NO_ARITHMETIC])
def test_what_is_no_short_arithmetic_is_refused_in_one_line(expression):
    with pytest.raises(ValueError, match=r"\A[^\n]{5,120}\Z"):
        calculator(expression)

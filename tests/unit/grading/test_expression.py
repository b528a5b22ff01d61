"""The reader of LaTeX expressions, and equality by values."""

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from luffy.grading.equivalence.expression import UnreadableError, read, read_or_none
from luffy.grading.equivalence.numeric import close, constant_value, proportional, same

_numbers = st.integers(0, 30)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (r"2\frac{3}{4}", Fraction(11, 4)),
        ("1 1/2", Fraction(3, 2)),
        (r"0.1\overline{6}", Fraction(1, 6)),
        (r"\frac12", Fraction(1, 2)),
        (r"\binom{5}{2}", 10),
        ("C_{5}^{2}", 10),
        ("5!!", 15),
        (r"\sqrt{\frac{9}{4}}", Fraction(3, 2)),
        (r"\sqrt[3]{-8}", -2),
        ("-3^2", -9),
        (r"\lfloor -\frac12 \rfloor", -1),
        (r"\gcd(12, 18)", 6),
        (r"\log_4 8", Fraction(3, 2)),
        (r"\sin 30^\circ", Fraction(1, 2)),
        (r"\tan^{-1} 0", 0),
    ],
)
def test_constants_have_their_value(text: str, value: Fraction | int) -> None:
    found = constant_value(read(text))
    assert found is not None
    assert close(found, Fraction(value)) or abs(complex(found) - float(value)) == 0


AMBIGUOUS = "1/2x", r"\sin 2x/3", "3 4", r"2\frac{5}{4}", "1/2/3", r"\log_28", "x^y^z"
INVALID = "52_8", "f(x)", "a'", "x =", "", "5 apples"


@pytest.mark.parametrize("text", [*AMBIGUOUS, *INVALID])
def test_ambiguous_or_invalid_expressions_are_not_read(text: str) -> None:
    with pytest.raises(UnreadableError):
        read(text)


@pytest.mark.parametrize(
    ("left", "right", "equal"),
    [
        (r"\cos 2x", r"1-2\sin^2 x", True),
        (r"\frac{(2n)!}{n!(n+1)!}", r"\frac{1}{n+1}\binom{2n}{n}", True),
        (r"\sqrt{4+2\sqrt3}", r"1+\sqrt3", True),
        ("e^{x+2}", "e^2e^x", True),
        (r"|x|^2", "x^2", True),
        (r"\gcd(n, 2n)", "n", True),
        (r"\sqrt{x^2}", "x", False),
        ("10^{40}+1", "10^{40}", False),
        ("10^{1000}+1", "10^{1000}", False),
        (r"\frac{1}{2004!}", r"\frac{1}{2006!}", False),
        ("0.333333", r"\frac13", False),
        ("x+y", "x+z", False),
        (r"\lfloor\frac n2\rfloor", r"\lceil\frac n2\rceil", False),
        ("3.141592653589793238462643383279", r"\pi", False),
    ],
)
def test_equal_expressions_are_the_same_and_different_ones_are_not(left: str, right: str, equal: bool) -> None:
    assert same(read(left), read(right)) is equal


@settings(deadline=None, max_examples=60)
@given(_numbers, _numbers, _numbers, st.integers(1, 30))
def test_arithmetic_is_exact(a: int, b: int, c: int, d: int) -> None:
    written = rf"\frac{{{a}-{b}\cdot {c}}}{{{d}}}+({a}-{c})^2-{b}/{d}"
    assert constant_value(read(written)) == Fraction(a - b * c, d) + (a - c) ** 2 - Fraction(b, d)


@settings(deadline=None, max_examples=60)
@given(_numbers, _numbers, st.integers(1, 5))
def test_polynomials_are_the_same_only_with_equal_coefficients(a: int, b: int, c: int) -> None:
    factors, expanded = read(f"(x+{a})(x-{b})"), read(f"x^2+{a}x-{b}x-{a * b}")
    assert same(factors, expanded)
    assert not same(factors, read(f"x^2+{a}x-{b}x-{a * b}+{c}"))
    assert proportional(read(f"{c}(x+{a}y)"), read(f"{c + 1}(x+{a}y)"))


@pytest.mark.parametrize("text", [r"\sin 10^{1000}", "9^{9^{9}}", "(10^{6})!", r"\binom{10^9}{10^8}", "e^{10^{10}}"])
def test_expensive_expressions_have_no_value(text: str) -> None:
    expression = read_or_none(text)
    assert expression is not None
    assert constant_value(expression) is None

r"""Kinds of notation that graders read wrongly, each with look-alikes that stay wrong."""

import pytest

from luffy.grading.checks import MATH, run_check
from luffy.types import Outcome

ZEROS_AND_ALTERNATIVES = [
    ("0", r"\cos\frac{\pi}{2}", True),
    ("0", r"\sin\pi", True),
    ("0", "2^{-200}", False),
    ("0", "e^{-200}", False),
    ("0", "e^{-1000}", False),
    ("0", r"\sin 10^{-50}", False),
    ("0", r"\sqrt2\cdot\sqrt2-2", True),
    (r"33\frac13\%", r"\frac13", True),
    (r"33\frac13\%", r"\frac23", False),
    ("12:30", "12{:}30", True),
    ("12:30", "12{:}31", False),
    ("42", "43=42", False),
    ("42", "42=42.0", True),
    ("42", "40+2=42", True),
    ("42", "x=40+2=42", True),
    ("0.5", r"\frac12=0.5", True),
    ("0.333", r"\frac13=0.333", True),
    ("42", r"42 \text{ or 43}", False),
    ("42", r"42 \text{ or anything}", False),
    ("42", r"42 \text{ or } 42.0", True),
    ("42", r"42\mod 43", True),
    ("41", r"42\mod 43", False),
    ("1,2", r"x=1 \text{ or } x=2", True),
    (r"\pm 3", r"3 \text{ or } -3", True),
    (r"(-\infty,2)\cup(3,\infty)", r"x<2 \text{ or } x>3", True),
]
WORDS = [
    ("10", r"10 \text{ a.m.}", True),
    ("10", r"11 \text{ a.m.}", False),
    (r"10 \text{ p.m.}", r"10 \text{ a.m.}", False),
    ("12:30", r"12:30 \text{ PM}", True),
    ("12:30", r"1:30 \text{ PM}", False),
    (r"12:30\text{ AM}", r"12:30 \text{ PM}", False),
    (r"\text{dog}", r"\text{god}", False),
    (r"\text{war}", r"\text{raw}", False),
    (r"\text{stop}", r"\text{pots}", False),
    (r"\text{dog}", "dog", True),
    (r"\text{Dog}", r"\text{dog}", True),
    (r"\text{Lee}", r"\text{eel}", False),
    ("abc", "cab", True),
    (r"\text{No}", r"\text{no}", True),
    (r"\text{No}", r"\text{No, it is not}", True),
    (r"\text{No}", r"\text{Yes}", False),
    (r"\text{Yes}", r"\text{Yes and no}", False),
    (r"\text{Yes}", r"\text{Yes, or no}", False),
    (r"\text{does not exist}", "DNE", True),
    ("DNE", r"\text{does not exist}", True),
    (r"\text{does not exist}", r"\text{exists}", False),
    ("DNE", r"\text{Does not exist.}", True),
]
PERCENTAGES = [
    ("12.5", r"12.5\%", True),
    ("12.5", r"12.5\text{ percent}", True),
    ("20", r"20\%", True),
    ("0.2", r"20\%", True),
    ("0.2", r"0.2\%", False),
    ("12.5", r"125\%", False),
    ("12.5", r"1.25\%", False),
    (r"12.5\%", "0.125", True),
    (r"50\%", r"0.5\%", False),
    (r"20\%", "2", False),
    ("62.5", "62.5 percent", True),
    ("-12.5", r"12.5\%", False),
]
PRIMES = [
    ("y'", "y''", False),
    ("y''=x", "y'''=x", False),
    ("y'=x", r"y^{\prime}=x", True),
    ("y''=x", r"y^{\prime\prime}=x", True),
    ("y'=x", r"y^{\prime\prime}=x", False),
    ("x'+1", "x''+1", False),
    ("y''=x", r"y^{\prime}=x", False),
    ("f'(x)", r"f^\prime(x)", True),
    ("y'", "y", False),
    (r"\ddot{x}", r"\dot{x}", False),
]
CONDITIONS = [
    ("f(x)=2x", r"f(x)=2x \text{ for all } x\in\mathbb{R}", True),
    ("2x", r"2x, \text{ where } x\in\mathbb{R}", True),
    ("42", r"42, \text{ where } x=1", True),
    ("42", r"41, \text{ where } x=42", False),
    ("2x", r"x, \text{ where } x=2x", False),
    ("42", r"43, \text{ where } x=1", False),
    ("2x", r"3x \text{ for all } x\in\mathbb{R}", False),
    ("f(x)=x", r"f(x)=x \quad \forall x\in\mathbb{R}", True),
    ("f(x)=2x", r"f(x)=2x \text{ for some } x\in\mathbb{R}", False),
]


@pytest.mark.parametrize(
    ("gold", "answer", "same"), [*ZEROS_AND_ALTERNATIVES, *WORDS, *PERCENTAGES, *PRIMES, *CONDITIONS]
)
def test_the_same_in_another_notation_is_right_and_a_look_alike_wrong(gold: str, answer: str, same: bool) -> None:
    assert (run_check(MATH, answer, gold, "")[0] is Outcome.CORRECT) is same

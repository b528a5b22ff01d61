"""Answers whose presentation is no part of them, and look-alikes whose commands mean something."""

import pytest

from luffy.grading.equivalence.text import unadorned
from luffy.types import Outcome

SAME = [
    # answer, gold
    (r"\textbf{(C)}\ 12", "12"),
    (r"\textbf{(C) } 12", "12"),
    (r"\textbf{(C) 12}", "12"),
    (r"\text{(C) }12", "12"),
    (r"\mathrm{(E)}\ 12", "12"),
    (r"\textbf{(A)}\ \frac{1}{2}", r"\frac12"),
    (r"\textbf{(A)}\ -12", "-12"),
    (r"\textcolor{red}{36}", "36"),
    (r"\textcolor{red}{\frac{1}{2}}", "0.5"),
    (r"\color{red}{36}", "36"),
    (r"\color{blue}36", "36"),
    (r"\large 36", "36"),
    (r"{\Large 36}", "36"),
    (r"\textcolor{red}{\large{36}}", "36"),
    (r"\underline{36}", "36"),
    (r"36 \checkmark", "36"),
    (r"\color{green}{36}\ \checkmark", "36"),
]
DIFFERENT = [
    (r"\textbf{(C)}\ 13", "12"),
    (r"\textbf{(C)}\ -12", "12"),
    (r"\textbf{(C)} + 12", "12"),
    (r"\textbf{(C)} or 12", "12"),
    (r"\textbf{(C)} \text{ or } 12", "12"),
    (r"\textbf{(C)} \cdot 12", "12"),
    (r"\textbf{(C)}^2", "2"),
    (r"\textbf{(C)}\ 12, \textbf{(D)}\ 13", "12"),
    (r"\textbf{(D)}\ 12", r"\textbf{(C)}\ 12"),
    (r"\textbf{(C)}", "12"),
    (r"\textbf{(F)}\ 12", "12"),
    (r"\textcolor{red}{3}\textcolor{blue}{6}", "3"),
    (r"\textcolor{red}{3}6", "3"),
    (r"\textcolor{red}{-}36", "36"),
    (r"\underline{abc}", "abc"),
    (r"\underline{36}5", "36"),
    (r"\checkmark 36", "63"),
    (r"\checkmark", "36"),
    (r"\large", "36"),
]


@pytest.mark.parametrize(
    ("answer", "gold", "same"), [*((*pair, True) for pair in SAME), *((*pair, False) for pair in DIFFERENT)]
)
def test_presentation_is_no_part_of_an_answer_and_what_only_looks_like_it_stays_wrong(pool, answer, gold, same):
    grade = pool.grade_one(f"\\boxed{{{answer}}}", gold)
    assert grade.outcome not in (Outcome.CRASHED, Outcome.TIMED_OUT)
    assert grade.extracted == answer
    assert (grade.outcome is Outcome.CORRECT) == same


@pytest.mark.parametrize("answer", ["12", r"\frac{1}{2}", "(C)", r"\{1, 2\}", "{1}+{2}", r"x \le 2", r"\text{(A, B)}"])
def test_an_answer_without_presentation_is_left_as_it_is(answer: str) -> None:
    assert unadorned(answer) == answer


@pytest.mark.parametrize("unit", ["{", r"\ ", r"\textcolor{a}{", r"\checkmark ", r"\large ", r"\textbf{(C)}\ ", " "])
def test_a_million_characters_are_unadorned(unit: str) -> None:
    """In time that grows with the square of the length, this would outlast pytest's limit."""
    side = unit * (500_000 // len(unit))
    assert len(unadorned(side + side)) <= 2 * len(side)
    assert "x" in unadorned(side + "x" + side)

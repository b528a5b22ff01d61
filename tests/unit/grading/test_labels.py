"""Labels of options in answers and references, by both graders of mathematics."""

import pytest

from luffy.config.grading import MathGrader, StrictMathGrader
from luffy.grading.equivalence.certain import by_label
from luffy.grading.pool import GraderPool
from luffy.types import Outcome

RIGHT = [
    # reference, answer
    *(("C", answer) for answer in (r"\text{(C) }12", r"\textbf{(C)}\ 12", r"\textbf{(C) \frac{1}{2}}", "C: 12")),
    *((r"\text{(C)}", answer) for answer in ("C. 12", "C) 12", r"(C)\ \frac{1}{2}", r"\text{Option C}", "C")),
    *((r"\textbf{(C)}\ 12", answer) for answer in ("C", "(C)", "12", r"\text{(C) }12", r"\frac{24}{2}")),
    *((reference, "12") for reference in (r"\textbf{(C) }12", r"\mathrm{(C)}\ 12", r"(C)\ 12", "C. 12")),
    *(("12", answer) for answer in ("A) 12", "C. 12", "C: 12", r"\textbf{(C)}\ 12")),
    (r"\textbf{(C)}\ \frac{1}{2}", "0.5"),
    (r"\textbf{(C)} -12", "-12"),
]
WRONG = [
    *(("C", answer) for answer in ("B. 12", "A, C", r"\text{A or C}", r"(C)\ 12 \text{ or } (D)\ 13")),
    *(("C", answer) for answer in ("C-12", "(C) + 12", "(C) - 12", "C(12)", "12C", "C:12", r"(C) \cup (D)", "C_1")),
    *((r"\text{(C)}", answer) for answer in ("12", "D", r"\text{(C) is wrong}", r"\text{not (C)}", "A. B. C")),
    *((r"\textbf{(C)}\ 12", answer) for answer in ("B", "13", r"\textbf{(B)}\ 12", r"\textbf{(C)}\ 13", "c+12")),
    *(("12", answer) for answer in ("A) 13", "F. 12", "A. 12 or 13", "C")),
    ("(A)x+1", "A"),
    ("(A) + 1", "A"),
    ("A:5", "A"),
    ("A", "(B)"),
]


@pytest.mark.parametrize("kind", [MathGrader(), StrictMathGrader()], ids=lambda kind: kind.kind)
@pytest.mark.parametrize(
    ("reference", "answer", "is_right"), [*((*pair, True) for pair in RIGHT), *((*pair, False) for pair in WRONG)]
)
def test_a_label_stands_for_its_option(pool: GraderPool, kind, reference: str, answer: str, is_right: bool) -> None:
    grade = pool.grade_one(f"\\boxed{{{answer}}}", reference, kind=kind)
    assert (grade.outcome is Outcome.CORRECT) == is_right


@pytest.mark.parametrize("pair", [("A", "B"), ("x", "C"), ("C", "x"), ("(2,3)", "C"), ("5 C", "C"), ("{" * 40, "C")])
def test_letters_without_a_label_are_left_to_the_grader(pair: tuple[str, str]) -> None:
    assert by_label(*pair) == pair

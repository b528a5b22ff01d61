"""Kinds of graders: what each says, how they combine, and which of them grades what."""

from collections.abc import Iterator

import pytest
from patience import PATIENCE_S

from luffy.config.grading import (
    AnyGrader,
    BothGrader,
    ChoiceGrader,
    ExactGrader,
    FormatGrader,
    GraderKind,
    GradingConfig,
    MathGrader,
    StrictMathGrader,
    WeightedGrader,
    WeightedPart,
)
from luffy.errors import DataError
from luffy.grading.pool import GraderPool
from luffy.grading.request import GradeRequest, Problem
from luffy.types import Outcome

MATH, STRICT = MathGrader(), StrictMathGrader()
PREFERRED = MathGrader(boxed="preferred")
R1_ZERO = FormatGrader(template="r1_zero")
MATRIX = r"\begin{pmatrix}%s\\2\end{pmatrix}"


def weighted(form: float) -> WeightedGrader:
    return WeightedGrader(
        parts=(WeightedPart(weight=1.0, grader=MATH), WeightedPart(weight=form, grader=FormatGrader()))
    )


@pytest.fixture(scope="module")
def pool() -> Iterator[GraderPool]:
    config = GradingConfig(named={"lenient": PREFERRED})
    with GraderPool(2, PATIENCE_S, config) as shared:
        yield shared


@pytest.mark.parametrize(
    ("kind", "response", "gold", "outcome"),
    [
        (MATH, "it is 5", "5", Outcome.NO_ANSWER),
        (PREFERRED, "it is 5", "5", Outcome.CORRECT),
        (PREFERRED, "The answer is: $\\frac{1}{2}$.", "0.5", Outcome.CORRECT),
        (PREFERRED, "<think>6</think> <answer> 5 </answer>", "5", Outcome.CORRECT),
        (PREFERRED, "<answer>7</answer> or \\boxed{5}", "5", Outcome.CORRECT),
        (PREFERRED, "The largest $n$: the answer is that $n$ is 34.", "34", Outcome.CORRECT),
        (PREFERRED, "-\\frac{10}{9}", "-10/9", Outcome.CORRECT),
        (PREFERRED, "<think>5", "5", Outcome.NO_ANSWER),
        (PREFERRED, "I do not know", "5", Outcome.NO_ANSWER),
        (STRICT, r"\boxed{(x+1)^2}", "x^2+2x+1", Outcome.CORRECT),
        (STRICT, r"\boxed{50\%}", "0.5", Outcome.CORRECT),
        (STRICT, r"\boxed{0.3333}", r"\frac13", Outcome.WRONG),
        (STRICT, r"\boxed{[0,1)}", "[0,1]", Outcome.WRONG),
        (STRICT, "the answer is 5", "5", Outcome.NO_ANSWER),
        (STRICT, r"\boxed{the whole truth}", "5", Outcome.UNPARSABLE),
        (STRICT, rf"\boxed{{{MATRIX % 1}}}", MATRIX % r"\frac22", Outcome.CORRECT),
        (ExactGrader(), "The answer is  New   York.", "new york", Outcome.CORRECT),
        (ExactGrader(), "Answer: Paris", "Paris", Outcome.CORRECT),
        (ExactGrader(), "Final Answer: Paris", "Paris", Outcome.CORRECT),
        (ExactGrader(), "**Answer:** Paris", "Paris", Outcome.CORRECT),
        (ExactGrader(), "**Answer**: Paris", "Paris", Outcome.CORRECT),
        (ExactGrader(), "Solution: Paris", "Paris", Outcome.CORRECT),
        (ExactGrader(), "an answering machine", "An answering machine", Outcome.CORRECT),
        (ExactGrader(), "The Final Solution", "the final solution", Outcome.CORRECT),
        (ExactGrader(), r"\boxed{\text{New York}}", "New York", Outcome.CORRECT),
        (ExactGrader(ignore_case=False), r"\boxed{new york}", "New York", Outcome.WRONG),
        (ExactGrader(boxed="required"), "New York", "New York", Outcome.NO_ANSWER),
        (ExactGrader(), "<think>New York</think> Boston", "New York", Outcome.WRONG),
        (FormatGrader(), "<think>\nhm\n</think>\n5", "6", Outcome.CORRECT),
        (FormatGrader(), "<think></think>5", "5", Outcome.WRONG),
        (FormatGrader(), "<think>hm</think> ", "5", Outcome.WRONG),
        (FormatGrader(), "so <think>hm</think> 5", "5", Outcome.WRONG),
        (FormatGrader(), "</think>hm<think> 5", "5", Outcome.WRONG),
        (FormatGrader(), "<think>hm</think></think> 5", "5", Outcome.WRONG),
        (R1_ZERO, "<think>hm</think> <answer>5</answer>", "6", Outcome.CORRECT),
        (R1_ZERO, "<think>hm</think> 5", "5", Outcome.WRONG),
        (R1_ZERO, "<think>hm</think> so <answer>5</answer>", "5", Outcome.WRONG),
        (R1_ZERO, "<think>hm<answer>5</answer></think>", "5", Outcome.WRONG),
        (R1_ZERO, "<think>hm</think> <answer> </answer>", "5", Outcome.WRONG),
        (ChoiceGrader(), "ANSWER: C", "C", Outcome.CORRECT),
    ],
)
def test_verdicts_by_kind(pool: GraderPool, kind: GraderKind, response: str, gold: str, outcome: Outcome) -> None:
    grade = pool.grade_one(response, gold, kind=kind)
    assert grade.outcome is outcome, grade
    assert grade.reward == (outcome is Outcome.CORRECT)
    assert grade.reason


def test_an_answer_without_a_box_names_its_cue(pool: GraderPool) -> None:
    grade = pool.grade_one("The answer is x + 1", "1+x", kind=PREFERRED)
    assert (grade.outcome, grade.extracted) == (Outcome.CORRECT, "x + 1")
    assert grade.reason.startswith("no box: read from 'the answer is'")
    assert grade.seconds > 0


def test_any_and_both_combine_their_parts(pool: GraderPool) -> None:
    rounded = r"\boxed{0.333333}"
    verdicts = [pool.grade_one(rounded, "1/3", kind=kind) for kind in (MATH, STRICT)]
    assert [grade.outcome for grade in verdicts] == [Outcome.CORRECT, Outcome.WRONG]
    either = pool.grade_one(rounded, "1/3", kind=AnyGrader(of=(STRICT, MATH)))
    both = pool.grade_one(rounded, "1/3", kind=BothGrader(of=(MATH, STRICT)))
    assert (either.outcome, either.reward) == (Outcome.CORRECT, 1.0)
    assert (both.outcome, both.reward) == (Outcome.WRONG, 0.0)
    assert "math_strict: different numbers" in both.reason


def test_a_weighted_sum_has_the_outcome_of_its_first_part(pool: GraderPool) -> None:
    kind = weighted(0.25)
    cases = [(r"<think>hm</think>\boxed{5}", 1.25), (r"\boxed{5}", 1.0), (r"<think>hm</think>\boxed{6}", 0.25)]
    grades = pool.grade([GradeRequest(response, "5", kind=kind) for response, _ in cases])
    assert [grade.reward for grade in grades] == [reward for _, reward in cases]
    assert [grade.outcome for grade in grades] == [Outcome.CORRECT, Outcome.CORRECT, Outcome.WRONG]


def test_nested_combinations_keep_their_parts_apart(pool: GraderPool) -> None:
    inner = AnyGrader(of=(ExactGrader(), ChoiceGrader()))
    kind = BothGrader(of=(inner, AnyGrader(of=(MATH, PREFERRED))))
    assert pool.grade_one(r"\boxed{5}", "5", kind=kind).outcome is Outcome.CORRECT
    assert pool.grade_one(r"\boxed{6}", "5", kind=kind).outcome is not Outcome.CORRECT


def test_a_problem_names_its_grader_and_an_unknown_one_is_named(pool: GraderPool) -> None:
    asked = [Problem(grader=name) for name in (None, "lenient", "choice", "math_strict")]
    grades = pool.grade([GradeRequest("The answer is (C)", "C", problem) for problem in asked])
    assert [grade.outcome is Outcome.CORRECT for grade in grades] == [False, True, True, False]
    with pytest.raises(DataError, match="no grader is called 'prose'"):
        pool.grade([GradeRequest("5", "5", Problem(grader="prose"))])


@pytest.mark.parametrize(
    "kind",
    [
        MATH,
        R1_ZERO,
        BothGrader(of=(MATH, FormatGrader())),
        AnyGrader(of=(ExactGrader(), MATH)),
        weighted(0.5),
    ],
)
def test_an_episode_whose_environment_failed_is_crashed_whatever_it_says(pool: GraderPool, kind: GraderKind) -> None:
    request = GradeRequest(r"<think>hm</think>\boxed{5}", "5", kind=kind, has_failed=True)
    (grade,) = pool.grade([request])
    assert (grade.outcome, grade.reward) == (Outcome.CRASHED, 0.0)
    assert "the environment failed" in grade.reason

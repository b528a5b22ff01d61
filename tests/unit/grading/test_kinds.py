"""Kinds of graders: what each says, how they combine, and which of them grades what."""

import json
from collections.abc import Iterator
from dataclasses import replace

import pytest
from support.installed import DATASETS, needs_datasets
from support.patience import PATIENCE_S

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
from luffy.data.prompt_templates import prompt_text
from luffy.errors import DataError
from luffy.grading.pool import GraderPool
from luffy.grading.request import GradeRequest, Problem, problem_of
from luffy.types import Message, Outcome, Prompt

MATH, STRICT = MathGrader(), StrictMathGrader()
PREFERRED = MathGrader(boxed="preferred")
R1_ZERO = FormatGrader(template="r1_zero")
R1_ZERO_TRACES = DATASETS / "r1_zero_sft_math" / "dothereading_sft.jsonl"
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


@pytest.mark.parametrize(
    "kind", [MATH, PREFERRED, STRICT, ExactGrader(), ExactGrader(boxed="required"), ChoiceGrader()]
)
@pytest.mark.parametrize(
    ("reply", "in_tag", "is_right"),
    [
        ("so <answer> 3 </answer>", True, True),
        (r"\boxed{4} <answer>3</answer>", True, True),
        (r"<answer>3</answer> or \boxed{4}", True, True),
        (r"<answer>it is \boxed{3}</answer>", True, True),
        (r"so \boxed{3}", True, True),
        ("<answer>3</answer> <answer>4</answer>", True, False),
        (r"\boxed{3} <answer>4</answer>", True, False),
        (r"<answer>3</answer> \boxed{4}", False, False),
        # A prompt that is not known: the form of the reply decides.
        ("<answer>3</answer>", None, True),
        (r"<answer>3</answer> \boxed{4}", None, False),
    ],
)
def test_the_prompt_decides_where_an_answer_stands(pool, kind, reply, in_tag, is_right):
    grade = pool.grade([GradeRequest(f"<think>4</think> {reply}", "3", Problem(in_tag=in_tag), kind)])[0]
    assert (grade.outcome is Outcome.CORRECT) == is_right


@pytest.mark.parametrize("kind", [MATH, STRICT])
@pytest.mark.parametrize(
    ("reply", "in_tag"),
    [("so <answer>3</answer>", None), ("<answer>3</answer>", False), ("<answer>3", True), ("<answer></answer>", True)],
)
def test_other_tags_mark_no_answer(pool, kind, reply, in_tag):
    grade = pool.grade([GradeRequest(f"<think>3</think> {reply}", "3", Problem(in_tag=in_tag), kind)])[0]
    assert grade.outcome is Outcome.NO_ANSWER


@pytest.mark.parametrize(("template", "in_tag"), [("r1_zero", True), ("qwen_math", False), ("prime", None)])
def test_a_template_tells_where_it_wants_the_answer(template: str, in_tag: bool | None) -> None:
    prompt = Prompt("uid", "test", (Message("user", "What is 1 + 2?"),), "3")
    assert problem_of(prompt, prompt_text(prompt, template)).in_tag is in_tag
    assert problem_of(prompt).in_tag is None
    asking = replace(prompt, messages=(Message("system", "End with <answer>NUMBER</answer>."), *prompt.messages))
    assert problem_of(asking).in_tag is True


@needs_datasets
@pytest.mark.parametrize("kind", [MATH, STRICT])
@pytest.mark.parametrize("in_tag", [True, None])
def test_traces_of_r1_zero_are_graded_by_every_grader(pool: GraderPool, kind: GraderKind, in_tag: bool | None) -> None:
    rows = [json.loads(line) for line in R1_ZERO_TRACES.read_text(encoding="utf-8").splitlines()]
    asked = [
        GradeRequest(row["response"], row["ground_truth"], Problem(row["question"], in_tag=in_tag), kind)
        for row in rows
    ]
    outcomes = [grade.outcome for grade in pool.grade(asked)]
    assert Outcome.NO_ANSWER not in outcomes
    assert outcomes.count(Outcome.CORRECT) >= (460 if kind is MATH else 440)


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


def test_rows_that_name_no_grader_have_that_of_their_data_source() -> None:
    config = GradingConfig.model_validate_json('{"by_source": {"arc": "choice", "shop": {"kind": "exact"}}}')
    problems = [Problem(data_source="arc"), Problem(data_source="math"), Problem(grader="math", data_source="arc")]
    with GraderPool(1, PATIENCE_S, config) as pool:
        kinds = [pool.kind_of(GradeRequest("", "", problem)).kind for problem in problems]
    assert kinds == ["choice", "math", "math"]


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

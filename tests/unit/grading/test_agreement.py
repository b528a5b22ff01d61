"""Agreement with labelled cases of other graders' test suites and labelled model outputs, where they are at hand.

Labels are policy, too: the floors are what the
policies of this grader reach (`test_verdicts.py`), class by class.
"""

import json
from collections.abc import Callable

import pyarrow.parquet as pq
import pytest
from support.installed import DATASETS, needs_datasets

from luffy.config.grading import ChoiceGrader, ExactGrader, GraderKind, MathGrader, StrictMathGrader
from luffy.grading.choice import grade_choice
from luffy.grading.pool import GraderPool
from luffy.grading.request import GradeRequest, Problem
from luffy.types import Outcome

CASES = DATASETS / "grader_cases" / "cases.jsonl"
OUTPUTS = DATASETS / "mmlu_pro_model_outputs" / "mathstral-7B.parquet"
QUESTIONS = DATASETS / "mmlu_pro" / "test.parquet"
pytestmark = pytest.mark.slow

MATH, STRICT, PREFERRED = MathGrader(), StrictMathGrader(), MathGrader(boxed="preferred")
Case = dict[str, object]


def is_word_problem(case: Case) -> bool:
    """Labelled GSM8K outputs, whose answer follows `A:`."""
    return bool(case["opts"].get("answer_marker"))  # type: ignore[attr-defined]


def is_pair(case: Case) -> bool:
    return case["kind"] == "answer_pair"


def is_boxed(case: Case) -> bool:
    """Several boxes are several answers to math-verify's tests; here the last one is the answer."""
    return case["kind"] == "response" and str(case["prediction"]).count("\\boxed") == 1


def is_response(case: Case) -> bool:
    return case["kind"] == "response" and not is_word_problem(case) and "lighteval" not in str(case["source"])


def is_choice(case: Case) -> bool:
    return case["kind"] == "mcq"


def response_of(case: Case) -> str:
    """The case as a policy would write it: bare answers in a box."""
    text = str(case["prediction"])
    if is_word_problem(case):
        reasoning, _, answer = text.rpartition("A:")
        return f"{reasoning}\\boxed{{{answer.strip()}}}"
    return f"\\boxed{{{text}}}" if is_pair(case) else text


def disagreements(pool: GraderPool, kind: GraderKind, wanted: Callable[[Case], bool]) -> tuple[int, int, int]:
    """How many cases there are, how many wrong answers are accepted, how many right ones refused."""
    cases = [case for case in map(json.loads, CASES.read_text(encoding="utf-8").splitlines()) if wanted(case)]
    requests = [
        GradeRequest(response_of(case), str(case["gold"]), Problem(extra_info=case["opts"]), kind) for case in cases
    ]
    accepted = [grade.outcome is Outcome.CORRECT for grade in pool.grade(requests)]
    pairs = [(found, bool(case["expected"])) for found, case in zip(accepted, cases, strict=True)]
    return len(cases), pairs.count((True, False)), pairs.count((False, True))


@needs_datasets
@pytest.mark.parametrize(
    ("kind", "wanted", "at_least", "accepted", "refused"),
    [
        (MATH, is_word_problem, 799, 0, 0),
        (STRICT, is_word_problem, 799, 0, 0),
        (ExactGrader(), is_word_problem, 799, 0, 2),
        (MATH, is_pair, 84, 4, 7),
        (STRICT, is_pair, 84, 3, 12),
        (MATH, is_boxed, 60, 3, 6),
        (STRICT, is_boxed, 60, 0, 16),
        (PREFERRED, is_response, 260, 4, 24),
        (ChoiceGrader(), is_choice, 125, 0, 2),
    ],
)
def test_no_more_disagreements_than_known(pool, kind, wanted, at_least, accepted, refused):
    count, wrongly_accepted, wrongly_refused = disagreements(pool, kind, wanted)
    assert count >= at_least
    assert wrongly_accepted <= accepted
    assert wrongly_refused <= refused


@needs_datasets
def test_letters_in_model_outputs_are_those_of_the_benchmarks_own_script() -> None:
    """Which guesses at random where it finds none (there are 367 of these), and takes the first of several answers."""
    options = {row["question_id"]: row["options"] for row in pq.read_table(QUESTIONS).to_pylist()}
    rows = pq.read_table(OUTPUTS).to_pylist()
    found = [
        grade_choice(
            GradeRequest(
                row["generated_text"], row["answer"], Problem(extra_info={"options": options[row["question_id"]]})
            )
        )
        for row in rows
    ]
    named = [grade.outcome in (Outcome.CORRECT, Outcome.WRONG) for grade in found]
    same = [grade.extracted == row["pred"] for grade, row in zip(found, rows, strict=True)]
    assert sum(named) >= 11_660
    assert sum(same) >= 11_640
    assert sum(one and not other for one, other in zip(named, same, strict=True)) <= 20

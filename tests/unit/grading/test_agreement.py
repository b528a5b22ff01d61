"""Agreement with labelled pairs, with labelled cases of other graders' test suites, and with published data sets where
they are at hand.

Labels are policy, too: the floors are what the policies of this grader reach (`test_verdicts.py`), class by class.
"""

import json
import re
from dataclasses import replace

import pyarrow.parquet as pq
import pytest
from support.installed import DATASETS, needs_datasets
from synthetic.answer_pairs import BUILT_FOR, HELD_OUT, answer_pairs
from synthetic.graders import CHOICE, EXACT, MATH, PREFERRED, STRICT

from luffy.grading.choice import grade_choice
from luffy.grading.extract import last_box
from luffy.grading.request import GradeRequest, Problem
from luffy.types import Outcome

pytestmark = pytest.mark.slow


def records(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def accepted(pool, requests):
    return [grade.outcome is Outcome.CORRECT for grade in pool.grade(requests)]


@pytest.mark.parametrize(
    ("kind", "name", "found"),
    [(MATH, BUILT_FOR, 148), (MATH, HELD_OUT, 36), (STRICT, BUILT_FOR, 0), (STRICT, HELD_OUT, 0)],
)
def test_labelled_right_answers_are_found_and_no_look_alike_is_accepted(pool, kind, name, found):
    pairs = answer_pairs(name)
    verdicts = accepted(pool, [GradeRequest(f"\\boxed{{{pair.answer}}}", pair.gold, kind=kind) for pair in pairs])
    labels = [pair.right for pair, yes in zip(pairs, verdicts, strict=True) if yes]
    assert labels.count(True) >= found
    assert labels.count(False) == 0


GROUPS = {
    # Labelled GSM8K outputs, whose answer follows `A:`.
    "word problems": lambda case: bool(case["opts"].get("answer_marker")),
    "pairs": lambda case: case["kind"] == "answer_pair",
    # Several boxes are several answers to math-verify's tests; here the last one is the answer.
    "boxed": lambda case: case["kind"] == "response" and str(case["prediction"]).count("\\boxed") == 1,
    "responses": lambda case: (
        case["kind"] == "response" and not case["opts"].get("answer_marker") and "lighteval" not in str(case["source"])
    ),
    "choices": lambda case: case["kind"] == "mcq",
}


def response_of(case):
    """The case as a policy would write it: bare answers in a box."""
    text = str(case["prediction"])
    if GROUPS["word problems"](case):
        reasoning, _, answer = text.rpartition("A:")
        return f"{reasoning}\\boxed{{{answer.strip()}}}"
    return f"\\boxed{{{text}}}" if GROUPS["pairs"](case) else text


@needs_datasets
@pytest.mark.parametrize(("kind", "group", "at_least", "wrongly_accepted", "wrongly_refused"), [
    (MATH, "word problems", 799, 0, 0), (STRICT, "word problems", 799, 0, 0), (EXACT, "word problems", 799, 0, 2),
    (MATH, "pairs", 84, 4, 7), (STRICT, "pairs", 84, 3, 12), (MATH, "boxed", 60, 3, 6), (STRICT, "boxed", 60, 0, 16),
    (PREFERRED, "responses", 260, 4, 24), (CHOICE, "choices", 125, 0, 2),
])  # fmt: skip
def test_no_more_disagreements_than_known(pool, kind, group, at_least, wrongly_accepted, wrongly_refused):
    cases = [case for case in records(DATASETS / "grader_cases/cases.jsonl") if GROUPS[group](case)]
    requests = [
        GradeRequest(response_of(case), str(case["gold"]), Problem(extra_info=case["opts"]), kind) for case in cases
    ]
    labels = [bool(case["expected"]) for case in cases]
    pairs = list(zip(accepted(pool, requests), labels, strict=True))
    assert len(pairs) >= at_least
    assert pairs.count((True, False)) <= wrongly_accepted
    assert pairs.count((False, True)) <= wrongly_refused


@needs_datasets
def test_letters_in_model_outputs_are_those_of_the_benchmarks_own_script():
    """Which guesses at random where it finds none (there are 367 of these), and takes the first of several answers."""
    questions = pq.read_table(DATASETS / "mmlu_pro/test.parquet").to_pylist()
    rows = pq.read_table(DATASETS / "mmlu_pro_model_outputs/mathstral-7B.parquet").to_pylist()
    info = {row["question_id"]: {"options": row["options"]} for row in questions}
    found = [
        grade_choice(GradeRequest(row["generated_text"], row["answer"], Problem(extra_info=info[row["question_id"]])))
        for row in rows
    ]
    named = [grade.outcome in (Outcome.CORRECT, Outcome.WRONG) for grade in found]
    same = [grade.extracted == row["pred"] for grade, row in zip(found, rows, strict=True)]
    assert sum(named) >= 11_660
    assert sum(same) >= 11_640
    assert sum(one and not other for one, other in zip(named, same, strict=True)) <= 20


@needs_datasets
def test_numbers_of_minerva_with_the_unit_that_their_solutions_name(pool):
    requests = []
    for problem in records(DATASETS / "minerva_math/test.jsonl"):
        solution = str(problem["solution"])
        gold = last_box(solution) or ""
        unit = re.search(re.escape(gold) + r"\}\s*(\\(?:mathrm|text)\s*\{[^{}]*\}(?:\^\{?-?\d\}?)?)", solution)
        if re.fullmatch("-?[0-9.e]+", gold) and unit is not None:
            requests.append(GradeRequest(f"\\boxed{{{gold} {unit[1]}}}", gold))
    assert len(requests) >= 30
    assert all(accepted(pool, requests))


@needs_datasets
@pytest.mark.parametrize("kind", [MATH, PREFERRED, STRICT])
def test_reference_solutions_of_gsm8k_are_right_and_altered_ones_wrong(pool, kind):
    solutions = [str(row["answer"]) for row in records(DATASETS / "gsm8k/test.jsonl")]
    right = [GradeRequest(solution, solution.rpartition("#### ")[2], kind=kind) for solution in solutions]
    altered = [replace(request, response=f"{request.response}1") for request in right]
    assert len(right) == 1319
    assert {grade.outcome for grade in pool.grade(right)} == {Outcome.CORRECT}
    assert {grade.outcome for grade in pool.grade(altered)} == {Outcome.WRONG}


@needs_datasets
@pytest.mark.parametrize(("kind", "at_least"), [(MATH, 460), (STRICT, 440)])
@pytest.mark.parametrize("in_tag", [True, None])
def test_traces_of_r1_zero_are_graded_by_every_grader(pool, kind, at_least, in_tag):
    requests = [
        GradeRequest(row["response"], row["ground_truth"], Problem(row["question"], in_tag=in_tag), kind)
        for row in records(DATASETS / "r1_zero_sft_math/dothereading_sft.jsonl")
    ]
    outcomes = [grade.outcome for grade in pool.grade(requests)]
    assert Outcome.NO_ANSWER not in outcomes
    assert outcomes.count(Outcome.CORRECT) >= at_least

"""Agreement with labelled cases from other graders' test suites, where the data lie beside the repository."""

import json
from pathlib import Path

import pytest

from luffy.grading import GradeRequest, GraderPool
from luffy.types import Outcome

CASES = Path(__file__).parents[3].parent / "shared" / "datasets" / "grader_cases" / "cases.jsonl"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not CASES.is_file(), reason="grader_cases are not beside this repository"),
]
Case = dict[str, object]


def agreement(cases: list[tuple[str, str, bool]]) -> float:
    with GraderPool(num_workers=2, timeout_s=20.0) as pool:
        grades = pool.grade([GradeRequest(response, gold) for response, gold, _ in cases])
    hits = [
        (grade.outcome is Outcome.CORRECT) == expected for grade, (_, _, expected) in zip(grades, cases, strict=True)
    ]
    return sum(hits) / len(hits)


def read_cases() -> list[dict[str, object]]:
    return [json.loads(line) for line in CASES.read_text(encoding="utf-8").splitlines()]


def test_word_problems_agree_with_their_labels() -> None:
    """Labelled GSM8K outputs, whose answer follows `A:`; boxed here, as a policy would write it."""
    cases = []
    for case in read_cases():
        if case["opts"].get("answer_marker"):  # type: ignore[attr-defined]
            reasoning, _, answer = str(case["prediction"]).rpartition("A:")
            cases.append((f"{reasoning}\\boxed{{{answer.strip()}}}", str(case["gold"]), bool(case["expected"])))
    assert len(cases) > 700
    assert agreement(cases) >= 0.998


def test_boxed_responses_agree_with_their_labels() -> None:
    """Several boxes in a response are several answers to math-verify's tests; here the last one is the answer."""
    cases = [
        (str(case["prediction"]), str(case["gold"]), bool(case["expected"]))
        for case in read_cases()
        if case["kind"] == "response" and str(case["prediction"]).count("\\boxed") == 1
    ]
    assert len(cases) > 60
    assert agreement(cases) >= 0.9


def test_answer_pairs_agree_with_their_labels() -> None:
    """The labels disagree among themselves about percentages, order and rounding."""
    cases = [
        (f"\\boxed{{{case['prediction']}}}", str(case["gold"]), bool(case["expected"]))
        for case in read_cases()
        if case["kind"] == "answer_pair"
    ]
    assert len(cases) > 70
    assert agreement(cases) >= 0.85

"""Reference answers graded against themselves."""

from collections.abc import Iterator

import pytest
from support.patience import PATIENCE_S

from luffy.config.grading import ChoiceGrader, ExactGrader, FormatGrader, GraderKind, GradingConfig, StrictMathGrader
from luffy.data.row_filters import check_golds
from luffy.grading.pool import GraderPool
from luffy.types import Message, Prompt


@pytest.fixture(scope="module")
def grader() -> Iterator[GraderPool]:
    with GraderPool(1, PATIENCE_S) as pool:
        yield pool


def prompt(gold: str, grader: str | None = None) -> Prompt:
    return Prompt(f"uid of {gold}", "t", (Message("user", "?"),), gold, grader=grader)


def findings(golds: list[str], grader: GraderPool) -> list[tuple[str, str]]:
    return check_golds([prompt(gold) for gold in golds], grader, GradingConfig())


def test_valid_references_are_correct_answers_to_themselves(grader: GraderPool) -> None:
    golds = ["033", "27.0", "\\frac{1}{2}", "$69$,$84$", "1,3,5", "$(1,8,19), (2,7,13), (4,5,7)$", "\\text{Evelyn}"]
    golds += ["#### 5", '{"ground_truth": "5"}', "{'ground_truth': 5}", '["\\\\boxed{5}"]', "x\n#### 5", "DNE"]
    assert {finding for finding, _ in findings(golds, grader)} == {"meets_itself"}


def test_references_that_cannot_be_boxed_fail_and_unreadable_ones_match_only_their_own_text(grader: GraderPool) -> None:
    golds = ["\\frac{1}{2", "3", "np.arcsin(10/13)", "\\arcsin(10/13)"]
    assert findings(golds, grader) == [
        ("fails", "no_answer"), ("meets_itself", "correct"), ("text_alone", "unparsable"), ("meets_itself", "correct"),
    ]  # fmt: skip


@pytest.mark.parametrize("gold", ["proof", "Proof.", "notfound", "None", "nan", "inf", "-inf", "N/A", "?"])
def test_a_word_for_no_answer_is_no_answer(grader: GraderPool, gold: str) -> None:
    texts = [gold, f"$\\text{{{gold}}}$", f'{{"ground_truth": "{gold}"}}']
    rows = [*map(prompt, texts), prompt(gold, "math_strict")]
    assert check_golds(rows, grader, GradingConfig()) == [("fails", "unparsable")] * 4


def test_each_row_is_checked_by_its_own_grader(grader: GraderPool) -> None:
    rows = [prompt("B", "choice"), prompt("Bee", "choice"), prompt("Bee", "exact"), prompt("x+", "math_strict")]
    assert check_golds(rows, grader, GradingConfig()) == [
        ("meets_itself", "correct"), ("fails", "unparsable"), ("meets_itself", "correct"), ("text_alone", "unparsable"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "finding"),
    [
        (StrictMathGrader(), "meets_itself"),
        (ExactGrader(), "meets_itself"),
        (ChoiceGrader(), "fails"),
        (FormatGrader(), "not_checked"),
    ],
)
def test_the_grader_of_the_experiment_checks_the_others(kind: GraderKind, finding: str) -> None:
    config = GradingConfig(kind=kind)
    with GraderPool(1, PATIENCE_S, config=config) as grader:
        assert [found for found, _ in check_golds([prompt("n+1")], grader, config)] == [finding]

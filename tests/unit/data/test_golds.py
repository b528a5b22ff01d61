"""Reference answers graded against themselves."""

from collections.abc import Iterator

import pytest
from patience import PATIENCE_S

from luffy.config.grading import ChoiceGrader, ExactGrader, FormatGrader, GraderKind, GradingConfig, StrictMathGrader
from luffy.data.card import check_golds
from luffy.grading.pool import GraderPool
from luffy.types import Message, Prompt


@pytest.fixture(scope="module")
def grader() -> Iterator[GraderPool]:
    with GraderPool(1, PATIENCE_S) as pool:
        yield pool


def prompt(gold: str, grader: str | None = None) -> Prompt:
    return Prompt(f"uid of {gold}", "t", (Message("user", "?"),), gold, grader=grader)


def findings(golds: list[str], grader: GraderPool) -> list[tuple[object, ...]]:
    check = check_golds([prompt(gold) for gold in golds], grader, GradingConfig())
    return [tuple(each.values()) for each in check.findings]


def test_valid_references_are_correct_answers_to_themselves(grader: GraderPool) -> None:
    golds = ["033", "27.0", "\\frac{1}{2}", "$69$,$84$", "1,3,5", "$(1,8,19), (2,7,13), (4,5,7)$", "\\text{Evelyn}"]
    check = check_golds([prompt(gold) for gold in golds], grader, GradingConfig())
    assert (check.counts, check.findings) == ({"meets_itself": 7, "not_checked": 0}, [])


def test_references_that_cannot_be_boxed_fail_and_unreadable_ones_match_only_their_own_text(grader: GraderPool) -> None:
    assert findings(["\\frac{1}{2", "3"], grader) == [("uid of \\frac{1}{2", "fails", "no_answer")]
    golds = ["np.arcsin(10/13)", "\\arcsin(10/13)"]
    assert findings(golds, grader) == [("uid of np.arcsin(10/13)", "text_alone", "unparsable")]


def test_each_row_is_checked_by_its_own_grader(grader: GraderPool) -> None:
    rows = [prompt("B", "choice"), prompt("Bee", "choice"), prompt("Bee", "exact"), prompt("x+", "math_strict")]
    found = check_golds(rows, grader, GradingConfig())
    assert [tuple(each.values()) for each in found.findings] == [
        ("uid of Bee", "fails", "unparsable"),
        ("uid of x+", "text_alone", "unparsable"),
    ]


@pytest.mark.parametrize(
    ("kind", "counts"),
    [
        (StrictMathGrader(), {"meets_itself": 1, "not_checked": 0}),
        (ExactGrader(), {"meets_itself": 1, "not_checked": 0}),
        (ChoiceGrader(), {"fails": 1, "meets_itself": 0, "not_checked": 0}),
        (FormatGrader(), {"meets_itself": 0, "not_checked": 1}),
    ],
)
def test_the_grader_of_the_experiment_checks_the_others(kind: GraderKind, counts: dict[str, int]) -> None:
    config = GradingConfig(kind=kind)
    with GraderPool(1, PATIENCE_S, config=config) as grader:
        assert check_golds([prompt("n+1")], grader, config).counts == counts

"""Classes of answers that are written in another way than their reference, each with its look-alikes."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic.answer_pairs import BUILT_FOR, HELD_OUT, AnswerPair, answer_pairs

from luffy.config.grading import GraderKind, MathGrader, StrictMathGrader
from luffy.grading.equivalence.alike import alike, conflicting
from luffy.grading.equivalence.statement import statement
from luffy.grading.equivalence.text import repaired
from luffy.grading.pool import GraderPool
from luffy.grading.request import GradeRequest
from luffy.types import Outcome

PAIRS = answer_pairs(BUILT_FOR)
SUBJECTS = sorted({pair.subject for pair in PAIRS})
_KNOWN_MISSES = {r"n = 3, 4, 5, \ldots"}


@pytest.mark.parametrize("subject", SUBJECTS)
def test_right_answers_of_a_class_are_found_and_look_alikes_are_not(subject: str) -> None:
    pairs = [pair for pair in PAIRS if pair.subject == subject and not (pair.right and pair.answer in _KNOWN_MISSES)]
    assert {pair.right for pair in pairs} == {True, False}
    assert [pair for pair in pairs if alike(pair.answer, pair.gold) != pair.right] == []


def graded(pool: GraderPool, pairs: list[AnswerPair], kind: GraderKind) -> tuple[int, int]:
    """Right answers found, wrong ones accepted."""
    grades = pool.grade([GradeRequest(f"\\boxed{{{pair.answer}}}", pair.gold, kind=kind) for pair in pairs])
    accepted = [grade.outcome is Outcome.CORRECT for grade in grades]
    found = sum(yes and pair.right for yes, pair in zip(accepted, pairs, strict=True))
    return found, sum(accepted) - found


@pytest.mark.slow
@pytest.mark.parametrize(("name", "found", "accepted"), [(BUILT_FOR, 148, 0), (HELD_OUT, 36, 0)])
def test_math_finds_right_answers_and_no_look_alikes(pool: GraderPool, name: str, found: int, accepted: int) -> None:
    pairs = answer_pairs(name)
    right, wrong = graded(pool, pairs, MathGrader())
    assert right >= found
    assert wrong <= accepted


@pytest.mark.slow
@pytest.mark.parametrize("name", [BUILT_FOR, HELD_OUT])
def test_math_strict_accepts_no_look_alikes(pool: GraderPool, name: str) -> None:
    _, wrong = graded(pool, answer_pairs(name), StrictMathGrader())
    assert wrong == 0


@pytest.mark.parametrize(
    ("gold", "answer", "differ"),
    [
        ("7, 4", r"4 \text{ goats and } 7 \text{ helicopters}", True),
        ("16, 3", "w=3, d=16", True),
        (r"40 \text{ km/h}", r"40 \text{ m/s}", True),
        (r"3:30 \text{ p.m.}", r"3:30 \text{ a.m.}", True),
        ("3", r"3 \text{ dozen}", True),
        ("5", r"\text{at most } 5", True),
        # On one side only they do not.
        ("5", r"\text{the least value is } 5", False),
        ("13", "AM = 13", False),
        ("16, 3", "w=16, d=3", False),
        ("5", "5 cm", False),
    ],
)
def test_different_names_units_and_words_distinguish_equal_numbers(gold: str, answer: str, differ: bool) -> None:
    assert conflicting(answer, gold) is differ


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 7), st.integers(-20, 20), st.integers(-3, 3), st.integers(1, 3))
def test_a_family_is_its_shifts_and_its_parts(period: int, offset: int, shift: int, parts: int) -> None:
    family = rf"{period}k{offset:+d}, k\in\mathbb{{Z}}"
    pieces = ", ".join(f"{period * parts}n{offset + period * (shift + index):+d}" for index in range(parts))
    assert alike(rf"{pieces}, n\in\mathbb{{Z}}", family)
    assert not alike(rf"{pieces}, {period * parts}n{offset}.5, n\in\mathbb{{Z}}", family)
    assert not alike(rf"{2 * period}n{offset:+d}, n\in\mathbb{{Z}}", family)


@settings(deadline=None, max_examples=60)
@given(st.permutations(range(4)))
def test_named_lists_are_matched_by_name(order: list[int]) -> None:
    items = [f"{name}={index + 2}" for index, name in enumerate("pqrs")]
    assert alike(", ".join(items[index] for index in order), ", ".join(items))
    assert alike(", ".join(str(index + 2) for index in order), ", ".join(items)) == (order == [0, 1, 2, 3])


BROKEN = ["\frac{1}{2}", "x \neq 3", "\right)", "2\theta", "\binom{5}{2}", "60^{\textcirc}", "\bar{x}"]


@pytest.mark.parametrize("text", [*BROKEN, "\varphi", "\alpha"])
def test_broken_commands_are_whole_again(text: str) -> None:
    assert "\\" in repaired(text)
    assert not any(ord(character) < 32 for character in repaired(text))


@pytest.mark.parametrize("text", ["a\tb", "5\n", "text", "the next one", "race{", r"\frac{1}{2}", "1\nno"])
def test_layout_and_words_stay(text: str) -> None:
    assert repaired(text) == text


@pytest.mark.parametrize("text", [r"\text{more than } 15", r"\text{not } 15", "3 and half", r"\text{between 3 and 5}"])
def test_a_text_with_a_qualifying_word_states_nothing(text: str) -> None:
    assert statement(text) is None


@pytest.mark.parametrize(
    "unit", ["9 a", "a ", "x=", "1,", "(", "\\pm ", "and ", "k\\in", "}", "9^", "x<", "=1,", "\\cup(0,1)"]
)
def test_the_longest_answers_are_compared(unit: str) -> None:
    text = (unit * 4096)[:4096]
    for gold in (r"x>2", "7, 4", r"\frac{\pi}{6}+k\pi, k\in\mathbb{Z}"):
        assert not alike(text, gold)
        assert not conflicting(text, gold)

"""The answer that is graded is the model's final one: never one of the prompt, never one of the reasoning."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from luffy.config.grading import (
    AnyGrader,
    BothGrader,
    ChoiceGrader,
    ExactGrader,
    GraderKind,
    MathGrader,
    StrictMathGrader,
    WeightedGrader,
    WeightedPart,
)
from luffy.grading.pool import GraderPool
from luffy.grading.request import Grade, GradeRequest, Problem, problem_of
from luffy.types import Message, Outcome, Prompt

KINDS: list[GraderKind] = [
    MathGrader(),
    MathGrader(boxed="preferred"),
    StrictMathGrader(),
    ExactGrader(boxed="required"),
    ChoiceGrader(),
    AnyGrader(of=(MathGrader(boxed="preferred"), ChoiceGrader())),
    BothGrader(of=(MathGrader(), StrictMathGrader())),
    WeightedGrader(parts=(WeightedPart(weight=1.0, grader=MathGrader()),)),
]
OPTIONS = {"options": ["one", "two", "three", "four"]}
WAYS = (r"\boxed{%s}", "the answer is %s", "ANSWER: %s", "<answer>%s</answer>", r"\boxed{\text{%s}}", "Answer: (%s)")
_way = st.sampled_from(WAYS)
_filler = st.text(alphabet="xyz ,.\n<>/{}\\$", max_size=30)


def shown_problem(*messages: tuple[str, str]) -> Problem:
    shown = tuple(Message(role, content) for role, content in messages)
    return problem_of(Prompt("uid", "test", shown, "B", extra_info=dict(OPTIONS)))


def grade(pool: GraderPool, kind: GraderKind, response: str, gold: str, question: str = "") -> Grade:
    return pool.grade([GradeRequest(response, gold, Problem(question, extra_info=OPTIONS), kind)])[0]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.kind)
@given(way=_way, before=_filler, between=_filler, opened=st.booleans(), gold=st.sampled_from("ABCD"))
@settings(max_examples=60, deadline=None)
def test_an_answer_in_the_reasoning_earns_nothing(pool, kind, way, before, between, opened, gold):
    thoughts = f"{before}{way % gold}{between}"
    closed = ("<think>" if opened else "") + thoughts + "</think>"
    for response in (closed, closed + "\nHm.", closed + closed, "<think>" + thoughts):
        found = grade(pool, kind, response, gold)
        assert found.outcome is not Outcome.CORRECT
        assert found.reward == 0
        assert found.reason


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.kind)
@given(way=_way, gold=st.sampled_from("ABCD"), other=st.sampled_from("ABCD"))
@settings(max_examples=40, deadline=None)
def test_the_reply_overrules_the_reasoning(pool: GraderPool, kind: GraderKind, way: str, gold: str, other: str) -> None:
    response = f"<think>{way % gold}</think> so \\boxed{{{other}}}"
    assert (grade(pool, kind, response, gold).outcome is Outcome.CORRECT) == (gold == other)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.kind)
@given(way=_way, filler=_filler, gold=st.sampled_from("ABCD"))
@settings(max_examples=40, deadline=None)
def test_an_answer_in_the_prompt_earns_nothing(pool, kind, way, filler, gold):
    question = f"Solve it. Example: {way % gold}. {filler} Now yours:"
    for response in (question, f"<think>hm</think>\n{question}\n", f"{question}{question}"):
        assert grade(pool, kind, response, gold, question).outcome is not Outcome.CORRECT


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.kind)
@pytest.mark.parametrize("way", WAYS)
def test_an_answer_in_any_message_earns_nothing(pool: GraderPool, kind: GraderKind, way: str) -> None:
    system = f"End with the answer, as in: {way % 'B'}"
    earlier = f"An example. {way % 'B'}\nThat was it."
    said = f"I go through all four of them one by one, rule out the others, and so in the end {way % 'B'} it must be."
    problem = shown_problem(("system", system), ("user", earlier), ("assistant", said), ("user", "Which of the four?"))
    for echo in (system, earlier, said, f"{earlier}\n{system}", f"<think>hm</think>{system}{said}"):
        found = pool.grade([GradeRequest(echo, "B", problem, kind)])[0]
        assert found.outcome is not Outcome.CORRECT
        own = pool.grade([GradeRequest(f"{echo}\n\\boxed{{B}}", "B", problem, kind)])[0]
        assert own.outcome is Outcome.CORRECT


def test_a_message_within_another_goes_with_it(pool: GraderPool) -> None:
    problem = shown_problem(("system", r"Write \boxed{B}"), ("user", r"Write \boxed{B}, or else \boxed{A}."))
    response = problem.question
    assert pool.grade([GradeRequest(response, "A", problem)])[0].outcome is Outcome.NO_ANSWER


def test_a_short_answer_from_an_earlier_turn_may_be_given_again(pool: GraderPool) -> None:
    problem = shown_problem(("user", "The first?"), ("assistant", "The answer is (B)."), ("user", "And the second?"))
    assert pool.grade([GradeRequest("The answer is (B).", "B", problem, ChoiceGrader())])[0].reward == 1

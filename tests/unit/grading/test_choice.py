"""Multiple choice: whose letter counts."""

import pytest

from luffy.grading.choice import grade_choice
from luffy.grading.request import Grade, GradeRequest, Problem
from luffy.types import Outcome

OPTIONS = ("Mars", "Planetary days", "Venus", "The day becomes shorter.")
QUESTION = 'Which?\nA) Mars\nB) Planetary days\nC) Venus\nThe last line must be "ANSWER: $LETTER". Example: Answer: B'


def choose(response: str, gold: str = "C", options: tuple[str, ...] = OPTIONS, question: str = "") -> Grade:
    return grade_choice(GradeRequest(response, gold, Problem(question, extra_info={"options": list(options)})))


@pytest.mark.parametrize(
    "response",
    [
        r"so \boxed{C}",
        r"so \boxed{\text{C}}",
        r"so \boxed{(C)}",
        r"so \boxed{\textbf{C}}",
        r"so \boxed{\textbf{(C)}}",
        r"so \boxed{\textbf{(C) } 12}",
        r"so \boxed{\textbf{(C)}\ 12}",
        r"so \boxed{\textit{C}}",
        r"so \boxed{\textrm{(C)}}",
        r"so \boxed{\textnormal{C}}",
        r"so \boxed{C. Venus}",
        r"so \boxed{Venus}",
        r"so \boxed{c}",
        "ANSWER: C",
        "ANSWER: **C**",
        "**Answer:** C",
        "The answer is (C).",
        "the correct answer is C",
        "The correct answer is: C",
        "The answer is: (C)",
        "The answer is: **C**",
        "**The answer is:** C",
        "The answer is C. This option is the only planet.",
        "The answer is C.\n\nOption A is wrong; the other choice is too small.",
        "The answer is C. Cannot be A.",
        "The correct option is **C) Venus**.",
        "Therefore the answer is C, since A is wrong.",
        "the answer is Venus.",
        "Answer: Option C",
        "the answer is $\\boxed{C}$",
        "C",
        "(C)",
        "C. Venus",
        "I compared A and B.\n\nC",
        "<answer> C </answer>",
        "The answer is (A). No, wait: the answer is (C).",
        "Answer: Ｃ",
        "<think>the answer is A</think> The answer is C",
        "C is correct.",
        "**C** is correct.",
        "Option C is the correct answer.",
        "So, C is the right answer.",
        "A is wrong. Therefore (C) is the correct choice because it fits.",
        '{"answer": "C"}',
        "答案：C",
        "正确答案是 C。",
        "#### C",
    ],
)
def test_ways_to_name_the_letter(response: str) -> None:
    grade = choose(response)
    assert (grade.outcome, grade.extracted) == (Outcome.CORRECT, "C")


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("\\boxed{B}", "B"),
        ("The answer is (B).", "B"),
        ("Answer: C\n\nBye", "C"),
        ("\\boxed{Tl}", "A"),
        ("\\boxed{c}", "B"),
    ],
)
def test_a_label_is_read_although_an_option_has_the_text_of_another(response: str, answer: str) -> None:
    assert choose(response, "A", ("Tl", "C", "B")).extracted == answer


@pytest.mark.parametrize(
    ("response", "outcome"),
    [
        ("The answer is (A).", Outcome.WRONG),
        (r"\boxed{B}", Outcome.WRONG),
        (r"\boxed{A, C}", Outcome.UNPARSABLE),
        ("The answer is C or B", Outcome.UNPARSABLE),
        ("The answer is (A) and (C).", Outcome.UNPARSABLE),
        ("The answer is C. Wait, the answer is not C but B", Outcome.UNPARSABLE),
        ("The answer is C. Wait, the correct option is not C but B", Outcome.UNPARSABLE),
        ("The answer is C. On reflection the answer is unclear", Outcome.UNPARSABLE),
        ("The answer is C. No: the answer is B", Outcome.WRONG),
        (r"\boxed{C \lor B}", Outcome.UNPARSABLE),
        (r"\boxed{C \text{ or } B}", Outcome.UNPARSABLE),
        (r"\boxed{C} and then \boxed{C \quad \text{or} \quad B}", Outcome.UNPARSABLE),
        ("Answer: C is not correct", Outcome.UNPARSABLE),
        (r"\boxed{C is wrong}", Outcome.UNPARSABLE),
        (r"\boxed{42}", Outcome.UNPARSABLE),
        ("The answer is a dog.", Outcome.UNPARSABLE),
        ("The answer is H", Outcome.UNPARSABLE),
        ("Compare A, B and C before you speak.", Outcome.NO_ANSWER),
        ("C is not correct.", Outcome.NO_ANSWER),
        ("C is incorrect.", Outcome.NO_ANSWER),
        ("Neither A nor C is correct.", Outcome.NO_ANSWER),
        ("A or C is correct.", Outcome.NO_ANSWER),
        ("If C is correct, then so is A.", Outcome.NO_ANSWER),
        ("Is C correct?", Outcome.NO_ANSWER),
        ("C is correct only if A is.", Outcome.NO_ANSWER),
        ("C is correct. B is correct.", Outcome.NO_ANSWER),
        ("It is false that C is correct.", Outcome.NO_ANSWER),
        ("C is correct. No: the answer is B", Outcome.WRONG),
        ('{"question": "C"}', Outcome.NO_ANSWER),
        ('{"answer": "C or B"}', Outcome.UNPARSABLE),
        ("答案：C 或 B", Outcome.UNPARSABLE),
        ("答案不是C", Outcome.NO_ANSWER),
        ("ANSWER: $LETTER", Outcome.UNPARSABLE),
        ("", Outcome.NO_ANSWER),
        ("<think>The answer is C", Outcome.NO_ANSWER),
        ("<think>The answer is C</think>", Outcome.NO_ANSWER),
    ],
)
def test_replies_without_a_single_letter_earn_nothing(response: str, outcome: Outcome) -> None:
    grade = choose(response)
    assert grade.outcome is outcome
    assert grade.reason
    assert grade.reward == 0


@pytest.mark.parametrize("gold", ["A", "B", "C"])
def test_a_repeated_question_answers_nothing(gold: str) -> None:
    assert choose(QUESTION, gold, question=QUESTION).outcome is Outcome.NO_ANSWER
    assert choose(QUESTION + "\nThe answer is A", "A", question=QUESTION).outcome is Outcome.CORRECT


@pytest.mark.parametrize(
    ("response", "outcome"),
    [
        (r"\boxed{3}", Outcome.CORRECT),
        ("The answer is 3)", Outcome.CORRECT),
        ("The answer is 2", Outcome.WRONG),
        ("The answer is Venus", Outcome.CORRECT),
        ("The answer is C", Outcome.UNPARSABLE),
    ],
)
def test_digits_are_labels_where_the_reference_is_one(response: str, outcome: Outcome) -> None:
    assert choose(response, "3").outcome is outcome


def test_the_pronoun_and_the_article_are_not_labels() -> None:
    many = tuple(f"option {n}" for n in range(10))
    assert choose("The answer is I think E", "I", many).outcome is not Outcome.CORRECT
    assert choose("The answer is I", "I", many).outcome is Outcome.CORRECT
    assert choose("The answer is A because it fits", "A", many).outcome is Outcome.CORRECT


@pytest.mark.parametrize("label", ["A", "B", "C", "I"])
@pytest.mark.parametrize(
    "response",
    [
        "Answer: %s\n\nBecause it fits.",
        "Answer: %s Because it fits.",
        "The answer is %s\nThe other options are wrong.",
        "**Answer: %s**\nThis is it",
        "**Answer:**\n%s\nThis is it",
        "<answer>%s\nThe others</answer>",
        "The answer is %s\n(the others fail)",
        "The answer is %s.\n\nD is wrong.",
        "The answer is %s. D is wrong.",
        "The answer is (%s). D is wrong.",
        "Answer: %s\n\nD) is wrong",
        "Answer: **%s**\n\n- D is wrong\n- E is wrong",
    ],
)
def test_an_explanation_after_the_label_leaves_it_a_label(response: str, label: str) -> None:
    many = tuple(f"option {n}" for n in range(10))
    assert choose(response % label, label, many).outcome is Outcome.CORRECT


@pytest.mark.parametrize(
    "answer", ["C, D", "C and D", "(C)/(D)", "C. D", "C. D.", "C\nD", "C\n\nA and D", "(C).\n(D)", "C or D. The rest"]
)
def test_a_second_label_earns_nothing(answer: str) -> None:
    for response in (f"Answer: {answer}", f"<answer>{answer}</answer>", rf"\boxed{{{answer}}}"):
        assert choose(response).outcome is not Outcome.CORRECT


def test_a_reference_that_is_not_a_label_is_named() -> None:
    grade = choose("C", "Venus?!")
    assert (grade.outcome, grade.reason) == (Outcome.UNPARSABLE, "the reference is no option's label")


@pytest.mark.parametrize(
    ("unit", "outcome"),
    [
        ("answer ", Outcome.NO_ANSWER),
        ("answer:", Outcome.UNPARSABLE),
        ("the answer is (", Outcome.UNPARSABLE),
        (" ", Outcome.NO_ANSWER),
        ("\\boxed{", Outcome.NO_ANSWER),
        ("A", Outcome.NO_ANSWER),
        ("<answer>", Outcome.NO_ANSWER),
        ("ANSWER A\n", Outcome.WRONG),
        ("C is correct. ", Outcome.CORRECT),
        ("答案", Outcome.NO_ANSWER),
    ],
)
def test_a_million_characters_are_read(unit: str, outcome: Outcome) -> None:
    """In time that grows with the square of the length, this would outlast pytest's limit."""
    assert choose(unit * (1_000_000 // len(unit))).outcome is outcome

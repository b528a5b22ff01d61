"""Kinds of graders: what each says, how they combine, which of them grades what, and whose letter counts in multiple
choice."""

import pytest
from synthetic.graders import CHOICE, EXACT, EXACT_BOX, FORMAT, MATH, PREFERRED, STRICT, any_of, both_of, weighted

from luffy.config.grading import FormatGrader, GradingConfig
from luffy.errors import DataError
from luffy.grading.choice import grade_choice
from luffy.grading.pool import GraderPool
from luffy.grading.request import GradeRequest, Problem
from luffy.types import Outcome

CORRECT, WRONG, NO_ANSWER, UNPARSABLE = Outcome.CORRECT, Outcome.WRONG, Outcome.NO_ANSWER, Outcome.UNPARSABLE
R1_ZERO = FormatGrader(template="r1_zero")
MATRIX = r"\begin{pmatrix}%s\\2\end{pmatrix}"


@pytest.mark.parametrize(("kind", "gold", "outcome", "responses"), [
    (MATH, "5", NO_ANSWER, ["it is 5"]),
    (PREFERRED, "5", CORRECT, ["it is 5", "<think>6</think> <answer> 5 </answer>", "<answer>7</answer> or \\boxed{5}"]),
    (PREFERRED, "0.5", CORRECT, ["The answer is: $\\frac{1}{2}$."]), (PREFERRED, "-10/9", CORRECT, ["-\\frac{10}{9}"]),
    (PREFERRED, "34", CORRECT, ["The largest $n$: the answer is that $n$ is 34."]),
    (PREFERRED, "5", NO_ANSWER, ["<think>5", "I do not know"]), (STRICT, "0.5", CORRECT, [r"\boxed{50\%}"]),
    (STRICT, "x^2+2x+1", CORRECT, [r"\boxed{(x+1)^2}"]), (STRICT, r"\frac13", WRONG, [r"\boxed{0.3333}"]),
    (STRICT, "[0,1]", WRONG, [r"\boxed{[0,1)}"]), (STRICT, "5", NO_ANSWER, ["the answer is 5"]),
    (STRICT, "5", UNPARSABLE, [r"\boxed{the whole truth}"]), (EXACT, "Paris", CORRECT, ["Solution: Paris"]),
    (STRICT, MATRIX % r"\frac22", CORRECT, [rf"\boxed{{{MATRIX % 1}}}"]),
    (EXACT, "new york", CORRECT, ["The answer is  New   York."]),
    (EXACT, "Paris", CORRECT, ["Answer: Paris", "Final Answer: Paris", "**Answer:** Paris", "**Answer**: Paris"]),
    (EXACT, "An answering machine", CORRECT, ["an answering machine"]), (CHOICE, "C", CORRECT, ["ANSWER: C"]),
    (EXACT, "the final solution", CORRECT, ["The Final Solution"]), (EXACT_BOX, "New York", NO_ANSWER, ["New York"]),
    (EXACT, "New York", CORRECT, [r"\boxed{\text{New York}}"]), (FORMAT, "6", CORRECT, ["<think>\nhm\n</think>\n5"]),
    (EXACT, "New York", WRONG, ["<think>New York</think> Boston"]),
    (FORMAT, "5", WRONG, ["<think></think>5", "<think>hm</think> ", "so <think>hm</think> 5"]),
    (FORMAT, "5", WRONG, ["</think>hm<think> 5", "<think>hm</think></think> 5"]),
    (R1_ZERO, "6", CORRECT, ["<think>hm</think> <answer>5</answer>"]),
    (R1_ZERO, "5", WRONG, ["<think>hm</think> 5", "<think>hm</think> so <answer>5</answer>"]),
    (R1_ZERO, "5", WRONG, ["<think>hm<answer>5</answer></think>", "<think>hm</think> <answer> </answer>"]),
])  # fmt: skip
def test_verdicts_by_kind(pool, kind, gold, outcome, responses):
    grades = pool.grade([GradeRequest(response, gold, kind=kind) for response in responses])
    assert [grade.outcome for grade in grades] == [outcome] * len(responses)
    assert {grade.reward for grade in grades} == {float(outcome is CORRECT)}
    assert all(grade.reason for grade in grades)


def test_an_answer_without_a_box_names_its_cue(pool):
    grade = pool.grade_one("The answer is x + 1", "1+x", kind=PREFERRED)
    assert (grade.outcome, grade.extracted) == (CORRECT, "x + 1")
    assert grade.reason.startswith("no box: read from 'the answer is'") and grade.seconds > 0


NESTED = both_of(any_of(EXACT, CHOICE), any_of(MATH, PREFERRED))
IN_FORM = weighted((1.0, MATH), (0.25, FORMAT))


@pytest.mark.parametrize(("kind", "gold", "response", "outcome", "reward", "reason"), [
    (any_of(STRICT, MATH), "1/3", r"\boxed{0.333333}", CORRECT, 1.0, ""),
    (both_of(MATH, STRICT), "1/3", r"\boxed{0.333333}", WRONG, 0.0, "math_strict: different numbers"),
    # A weighted sum has the outcome of its first part.
    (IN_FORM, "5", r"<think>hm</think>\boxed{5}", CORRECT, 1.25, ""), (IN_FORM, "5", r"\boxed{5}", CORRECT, 1.0, ""),
    (IN_FORM, "5", r"<think>hm</think>\boxed{6}", WRONG, 0.25, ""),
    (NESTED, "5", r"\boxed{5}", CORRECT, 1.0, ""), (NESTED, "5", r"\boxed{6}", WRONG, 0.0, ""),
])  # fmt: skip
def test_combinations_keep_their_parts_apart(pool, kind, gold, response, outcome, reward, reason):
    grade = pool.grade_one(response, gold, kind=kind)
    assert (grade.outcome, grade.reward) == (outcome, reward)
    assert reason in grade.reason


def test_rows_have_the_grader_that_they_name_or_that_of_their_data_source(pool):
    config = GradingConfig.model_validate_json('{"by_source": {"arc": "choice", "shop": {"kind": "exact"}}}')
    problems = [Problem(data_source="arc"), Problem(data_source="math"), Problem(grader="math", data_source="arc")]
    with GraderPool(1, 1.0, config) as by_source:
        kinds = [by_source.kind_of(GradeRequest("", "", problem)).kind for problem in problems]
    assert kinds == ["choice", "math", "math"]
    asked = [Problem(grader=name) for name in (None, "lenient", "choice", "math_strict")]
    grades = pool.grade([GradeRequest("The answer is (C)", "C", problem) for problem in asked])
    assert [grade.outcome is CORRECT for grade in grades] == [False, True, True, False]
    with pytest.raises(DataError, match="no grader is called 'prose'"):
        pool.grade([GradeRequest("5", "5", Problem(grader="prose"))])


@pytest.mark.parametrize("kind", [MATH, R1_ZERO, both_of(MATH, FORMAT), any_of(EXACT, MATH), IN_FORM])
def test_an_episode_whose_environment_failed_is_crashed_whatever_it_says(pool, kind):
    (grade,) = pool.grade([GradeRequest(r"<think>hm</think>\boxed{5}", "5", kind=kind, has_failed=True)])
    assert (grade.outcome, grade.reward) == (Outcome.CRASHED, 0.0)
    assert "the environment failed" in grade.reason


OPTIONS = ("Mars", "Planetary days", "Venus", "The day becomes shorter.")
TEN_OPTIONS = tuple(f"option {n}" for n in range(10))
QUESTION = 'Which?\nA) Mars\nB) Planetary days\nC) Venus\nThe last line must be "ANSWER: $LETTER". Example: Answer: B'


def choose(response, gold="C", options=OPTIONS, question=""):
    return grade_choice(GradeRequest(response, gold, Problem(question, extra_info={"options": list(options)})))


@pytest.mark.parametrize("responses", [
    [rf"so \boxed{{{box}}}" for box in ("C", r"\text{C}", "(C)", r"\textbf{C}", r"\textbf{(C)}", r"\textit{C}")],
    [rf"so \boxed{{{box}}}" for box in (r"\textbf{(C) } 12", r"\textbf{(C)}\ 12", r"\textrm{(C)}", "Venus", "c")],
    [r"so \boxed{\textnormal{C}}", r"so \boxed{C. Venus}", "the answer is $\\boxed{C}$"],
    ["ANSWER: C", "ANSWER: **C**", "**Answer:** C", "Answer: Option C", "Answer: Ｃ", "<answer> C </answer>"],
    ["The answer is (C).", "the correct answer is C", "The correct answer is: C", "The answer is: (C)"],
    ["The answer is: **C**", "**The answer is:** C", "the answer is Venus.", "#### C", "C", "(C)", "C. Venus"],
    ["The answer is C. This option is the only planet.", "Therefore the answer is C, since A is wrong."],
    ["The answer is C.\n\nOption A is wrong; the other choice is too small.", "The answer is C. Cannot be A."],
    ["The correct option is **C) Venus**.", "I compared A and B.\n\nC", '{"answer": "C"}'],
    ["The answer is (A). No, wait: the answer is (C).", "<think>the answer is A</think> The answer is C"],
    ["C is correct.", "**C** is correct.", "Option C is the correct answer.", "So, C is the right answer."],
    ["A is wrong. Therefore (C) is the correct choice because it fits.", "答案：C", "正确答案是 C。"],
])  # fmt: skip
def test_ways_to_name_the_letter(responses):
    grades = [choose(response) for response in responses]
    assert [(grade.outcome, grade.extracted) for grade in grades] == [(CORRECT, "C")] * len(responses)


@pytest.mark.parametrize(("outcome", "responses"), [
    (WRONG, ["The answer is (A).", r"\boxed{B}", "The answer is C. No: the answer is B"]),
    (WRONG, ["C is correct. No: the answer is B"]),
    (UNPARSABLE, [r"\boxed{A, C}", r"\boxed{C \lor B}", r"\boxed{C \text{ or } B}", r"\boxed{C is wrong}"]),
    (UNPARSABLE, [r"\boxed{C} and then \boxed{C \quad \text{or} \quad B}", r"\boxed{42}"]),
    (UNPARSABLE, ["The answer is C or B", "The answer is (A) and (C).", "The answer is a dog.", "The answer is H"]),
    (UNPARSABLE, ["The answer is C. Wait, the answer is not C but B", "Answer: C is not correct"]),
    (UNPARSABLE, ["The answer is C. Wait, the correct option is not C but B", '{"answer": "C or B"}']),
    (UNPARSABLE, ["The answer is C. On reflection the answer is unclear", "答案：C 或 B", "ANSWER: $LETTER"]),
    (NO_ANSWER, ["Compare A, B and C before you speak.", "C is not correct.", "C is incorrect."]),
    (NO_ANSWER, ["Neither A nor C is correct.", "A or C is correct.", "If C is correct, then so is A."]),
    (NO_ANSWER, ["Is C correct?", "C is correct only if A is.", "C is correct. B is correct."]),
    (NO_ANSWER, ["It is false that C is correct.", '{"question": "C"}', "答案不是C", ""]),
    (NO_ANSWER, ["<think>The answer is C", "<think>The answer is C</think>"]),
])  # fmt: skip
def test_replies_without_a_single_letter_earn_nothing(outcome, responses):
    grades = [choose(response) for response in responses]
    assert [(grade.outcome, grade.reward) for grade in grades] == [(outcome, 0)] * len(responses)
    assert all(grade.reason for grade in grades)


@pytest.mark.parametrize(("response", "gold", "options", "extracted"), [
    # A label is read although an option has the text of another one.
    ("\\boxed{B}", "A", ("Tl", "C", "B"), "B"), ("The answer is (B).", "A", ("Tl", "C", "B"), "B"),
    ("Answer: C\n\nBye", "A", ("Tl", "C", "B"), "C"), ("\\boxed{Tl}", "A", ("Tl", "C", "B"), "A"),
    ("\\boxed{c}", "A", ("Tl", "C", "B"), "B"),
    # The pronoun and the article are no labels, nor is a pronoun before a label.
    ("The answer is I", "I", TEN_OPTIONS, "I"), ("The answer is A because it fits", "A", TEN_OPTIONS, "A"),
    ("The answer is I think E", "I", TEN_OPTIONS, None),
    # Digits are labels where the reference is one.
    (r"\boxed{3}", "3", OPTIONS, "3"), ("The answer is 3)", "3", OPTIONS, "3"), ("The answer is 2", "3", OPTIONS, "2"),
    ("The answer is Venus", "3", OPTIONS, "3"),
])  # fmt: skip
def test_labels_are_told_from_words_and_texts_of_options(response, gold, options, extracted):
    grade = choose(response, gold, options)
    assert (grade.outcome is CORRECT) == (extracted == gold)
    assert extracted is None or grade.extracted == extracted


def test_a_letter_for_a_digit_is_no_answer_and_a_reference_that_is_no_label_is_named():
    assert choose("The answer is C", "3").outcome is UNPARSABLE
    grade = choose("C", "Venus?!")
    assert (grade.outcome, grade.reason) == (UNPARSABLE, "the reference is no option's label")


@pytest.mark.parametrize("gold", ["A", "B", "C"])
def test_a_repeated_question_answers_nothing(gold):
    assert choose(QUESTION, gold, question=QUESTION).outcome is NO_ANSWER
    assert choose(QUESTION + "\nThe answer is A", "A", question=QUESTION).outcome is CORRECT


@pytest.mark.parametrize("label", ["A", "B", "C", "I"])
@pytest.mark.parametrize("responses", [
    ["Answer: %s\n\nBecause it fits.", "Answer: %s Because it fits.", "**Answer: %s**\nThis is it"],
    ["**Answer:**\n%s\nThis is it", "<answer>%s\nThe others</answer>", "The answer is %s\n(the others fail)"],
    ["The answer is %s\nThe other options are wrong.", "The answer is %s.\n\nD is wrong."],
    ["The answer is %s. D is wrong.", "The answer is (%s). D is wrong.", "Answer: %s\n\nD) is wrong"],
    ["Answer: **%s**\n\n- D is wrong\n- E is wrong"],
])  # fmt: skip
def test_an_explanation_after_the_label_leaves_it_a_label(responses, label):
    assert {choose(response % label, label, TEN_OPTIONS).outcome for response in responses} == {CORRECT}


@pytest.mark.parametrize(
    "answer", ["C, D", "C and D", "(C)/(D)", "C. D", "C. D.", "C\nD", "C\n\nA and D", "(C).\n(D)", "C or D. The rest"]
)
def test_a_second_label_earns_nothing(answer):
    for response in (f"Answer: {answer}", f"<answer>{answer}</answer>", rf"\boxed{{{answer}}}"):
        assert choose(response).outcome is not CORRECT


@pytest.mark.parametrize(("unit", "outcome"), [
    *((unit, NO_ANSWER) for unit in ("answer ", " ", "\\boxed{", "A", "<answer>", "答案")),
    *((unit, UNPARSABLE) for unit in ("answer:", "the answer is (")),
    ("ANSWER A\n", WRONG), ("C is correct. ", CORRECT),
])  # fmt: skip
def test_a_million_characters_are_searched_for_a_letter(unit, outcome):
    """In time that grows with the square of the length, this would outlast pytest's limit."""
    assert choose(unit * (1_000_000 // len(unit))).outcome is outcome

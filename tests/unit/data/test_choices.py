"""Multiple-choice questions, from the shapes that data sets have to one."""

import random
from collections import Counter

import pytest
from pydantic import ValidationError
from support.patience import PATIENCE_S

from luffy.config.data import FieldsConfig
from luffy.data.overlap import BenchmarkIndex
from luffy.data.schema import RowError
from luffy.data.sources.column_mapping import columns_of, fixed_order, prompt_from_fields, without_options
from luffy.grading.pool import GraderPool
from luffy.grading.request import GradeRequest, problem_of
from luffy.types import Message, Outcome, Prompt

ARC = {"column": "choices.text", "labels": "choices.label"}
APART = {"correct": "right", "incorrect": ("w1", "w2", "w3")}


def asked(row: dict[str, object], choices: dict[str, object], **more: object) -> Prompt:
    answer = {} if "correct" in choices else {"answer": {"column": "a"}}
    config = {"data_source": "quiz", "problem": "q", "choices": choices, **answer, **more}
    return prompt_from_fields({"q": "Which?", **row}, FieldsConfig.model_validate(config), author="x")


def test_the_standard_form() -> None:
    prompt = asked({"options": ["8", "7"], "a": "B"}, {"column": "options"})
    assert prompt.messages == (Message("user", "Which?\n\nA. 8\nB. 7"),)
    assert (prompt.ground_truth, prompt.grader) == ("B", "choice")
    assert prompt.extra_info == {"options": ["8", "7"], "num_options": 2}
    assert without_options(prompt) == "Which?"


@pytest.mark.parametrize(
    ("labels", "answer", "letter"), [("ABCD", "C", "C"), ("1234", "3", "C"), ("ABC", "A", "A"), ("ABCDE", "E", "E")]
)
def test_digit_labels_and_three_or_five_options(labels: str, answer: str, letter: str) -> None:
    row = {"choices": {"text": [f"text {label}" for label in labels], "label": list(labels)}, "a": answer}
    prompt = asked(row, ARC)
    assert prompt.ground_truth == letter
    assert prompt.extra_info["num_options"] == len(labels)
    assert f"{letter}. text {answer}" in prompt.messages[-1].content.splitlines()


@pytest.mark.parametrize(
    ("row", "choices", "letter", "texts"),
    [
        ({"o": ["x", "y", "z"], "a": 2}, {"column": "o", "answer_is": "index"}, "C", ["x", "y", "z"]),
        ({"o": ["x", "y", "z"], "a": "y"}, {"column": "o", "answer_is": "text"}, "B", ["x", "y", "z"]),
        ({"o": "['x', 'y']", "a": "(B)."}, {"column": "o"}, "B", ["x", "y"]),
        ({"o": ["N/A", "x", "N/A", "y"], "a": "D"}, {"column": "o", "fillers": ("N/A",)}, "B", ["x", "y"]),
        ({"A": "x", "B": 7.0, "C": None, "a": "B"}, {"columns": ("A", "B", "C")}, "B", ["x", "7"]),
    ],
)
def test_formats_of_options_and_answers(row, choices, letter, texts):
    prompt = asked(row, choices)
    assert (prompt.ground_truth, prompt.extra_info["options"]) == (letter, texts)


def test_the_order_is_that_of_the_question_and_not_of_the_columns() -> None:
    row = {"right": "r", "w1": "a", "w2": "b", "w3": "c"}
    prompt = asked(row, APART)
    other = asked({"right": "r", "w1": "c", "w2": "a", "w3": "b"}, APART)
    assert prompt == other
    assert prompt.extra_info["options"]["ABCD".index(prompt.ground_truth)] == "r"  # type: ignore[index]
    assert fixed_order("Which?", ["r", "a", "b", "c"]) == ["r", "b", "a", "c"]  # the same on every machine


def test_right_answers_spread_over_the_letters() -> None:
    found = Counter(
        asked({"q": f"Question {n}", "right": "yes", "w1": "no", "w2": "perhaps", "w3": "never"}, APART).ground_truth
        for n in range(400)
    )
    assert set(found) == set("ABCD") and min(found.values()) > 60


def test_responses_are_graded_by_letter_and_by_the_text_of_the_option() -> None:
    prompt = asked({"options": ["a whale", "a bat"], "a": "B"}, {"column": "options"})
    replies = ["\\boxed{B}", "The answer is (b).", "\\boxed{a bat}", "ANSWER: A", "B or A"]
    with GraderPool(1, PATIENCE_S) as grader:
        grades = grader.grade([GradeRequest(reply, prompt.ground_truth, problem_of(prompt)) for reply in replies])
    right, wrong = Outcome.CORRECT, Outcome.WRONG
    assert [grade.outcome for grade in grades] == [right, right, right, wrong, Outcome.NO_ANSWER]


@pytest.mark.parametrize(
    ("row", "choices", "column", "reason"),
    [
        ({"o": ["x", "y"], "a": "C"}, {"column": "o"}, "a", "names none of the options"),
        ({"o": ["x", "y"], "a": "2"}, {"column": "o", "answer_is": "index"}, "a", "an index from 0 to 1"),
        ({"o": ["x", "x"], "a": "x"}, {"column": "o", "answer_is": "text"}, "a", "or several"),
        ({"o": ["x"], "a": "A"}, {"column": "o"}, "o", "2 to 26 options, found 1"),
        ({"o": "x", "a": "A"}, {"column": "o"}, "o", "must be a list of options"),
        ({"o": ["x", None], "a": "A"}, {"column": "o"}, "o\\[1\\]", "is missing"),
        ({"o": ["x", "N/A"], "a": "B"}, {"column": "o", "fillers": ("N/A",)}, "o", "found 1"),
        ({"o": ["x", "y", "N/A"], "a": "C"}, {"column": "o", "fillers": ("N/A",)}, "a", "that is a filler"),
        ({"choices": {"text": ["x", "y"], "label": ["A"]}, "a": "A"}, ARC, "choices.label", "a list of 2 labels"),
        ({"right": "r", "w1": "r", "w2": "b", "w3": "c"}, APART, "right", "one of the incorrect"),
        ({"right": "r", "w1": "", "w2": "b", "w3": "c"}, APART, "w1", "is empty"),
    ],
)
def test_the_wrong_column_of_a_question_is_named(row, choices, column, reason):
    with pytest.raises(RowError, match=f"^{column}: .*{reason}"):
        asked(row, choices)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"choices": {}}, "give one of column, columns, and correct"),
        ({"choices": {"correct": "c"}}, "correct and incorrect go together"),
        ({"choices": {"columns": ("a", "b"), "labels": "l"}}, "labels has no effect without column"),
        ({"choices": {"column": "o"}, "answer": None}, "answer: missing"),
        ({"choices": APART}, "answer has no effect beside choices.correct"),
        ({"answer": None}, "answer: missing"),
        ({"grader": "Two words"}, "should match pattern"),
    ],
)
def test_fields_without_effect_or_sense_are_refused(fields: dict[str, object], reason: str) -> None:
    config = {"data_source": "quiz", "problem": "q", "answer": {"column": "a"}, **fields}
    with pytest.raises(ValidationError, match=reason):
        FieldsConfig.model_validate(config)


@pytest.mark.parametrize(
    ("more", "grader"), [({}, "choice"), ({"grader": "exact"}, "exact"), ({"grader": "rule"}, None)]
)
def test_rows_name_their_grader(more: dict[str, object], grader: str | None) -> None:
    assert asked({"options": ["8", "7"], "a": "B"}, {"column": "options"}, **more).grader == grader


def test_all_columns_of_a_question_are_read() -> None:
    config = {"data_source": "d", "problem": "q", "id": "n", "choices": APART, "extra": ("s",)}
    assert columns_of(FieldsConfig.model_validate(config)) == ["q", "right", "w1", "w2", "w3", "n", "s"]


def test_an_id_distinguishes_equal_questions() -> None:
    row = {"options": ["8", "7"], "a": "B"}
    one, two, again = (asked({**row, "n": n}, {"column": "options"}, id="n") for n in (1, 2, 1))
    assert one.uid == again.uid != two.uid
    assert one.messages == two.messages


def test_a_short_question_is_found_with_its_options_in_another_order() -> None:
    def quiz(question: str, *options: str) -> Prompt:
        return asked({"q": question, "options": list(options), "a": "A"}, {"column": "options"})

    index = BenchmarkIndex(ngram=13, overlap=0.5)
    index.add("quiz", [quiz("Which of these barks?", "cat", "dog", "fish")])
    index.finish()
    found = index.equal(quiz("Which of these  barks?", "dog", "stone", "cat"))
    assert found is not None and (found.benchmark, found.row) == ("quiz", 1)
    assert index.equal(quiz("Which of these sings?", "cat", "dog", "fish")) is None


def test_a_question_is_found_in_training_data_with_and_without_its_options() -> None:
    rng = random.Random(0)
    question = " ".join(str(rng.randrange(10**6)) for _ in range(30))
    options = [" ".join(str(rng.randrange(10**6)) for _ in range(30)) for _ in range(4)]
    prompt = asked({"q": question, "options": options, "a": "A"}, {"column": "options"})
    index = BenchmarkIndex(ngram=13, overlap=0.5)
    assert index.add("quiz", [prompt]) == 1
    index.finish()
    for text in (question, prompt.messages[-1].content):
        assert index.equal(Prompt("u", "d", (Message("user", text),), "1"))
        (hit,) = index.find([f"They ask: {text} Well."])
        assert hit is not None and (hit.benchmark, hit.row, hit.share) == ("quiz", 1, 1.0)

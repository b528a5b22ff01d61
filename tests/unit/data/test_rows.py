"""From a row to a prompt: luffy's own columns, columns that a configuration names, and multiple-choice questions."""

import datetime
import decimal
import random
import re
from collections import Counter

import pytest
from pydantic import ValidationError

from luffy.config.data import FieldsConfig
from luffy.data.overlap import BenchmarkIndex
from luffy.data.schema import RowError, prompt_from_row, prompt_uid, record_batch
from luffy.data.sources.column_mapping import columns_of, fixed_order, prompt_from_fields, without_options
from luffy.grading.request import GradeRequest, problem_of
from luffy.types import Message, Outcome, Prompt

NAN = float("nan")
SOLUTION = {"role": "assistant", "content": "<think>\n</think>\n\\boxed{2}"}
ROW = {
    "data_source": "math",
    "prompt": [{"role": "user", "content": "1+1"}],
    "target": [SOLUTION],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "2"},
    "extra_info": {"split": "default", "index": 0},
}
NUMPYS = "[{'content': 'Be brief.', 'role': 'system'}\n {'content': 'a?', 'role': 'user'}]"


def test_a_row_of_luffy_becomes_a_prompt_with_one_trace():
    prompt = prompt_from_row(ROW, author="deepseek-r1")
    assert prompt.messages == (Message("user", "1+1"),)
    assert [trace.author for trace in prompt.traces] == ["deepseek-r1"]
    assert prompt.extra_info == {"split": "default", "index": 0}
    assert prompt.uid == prompt_uid("math", prompt.messages)
    plain = prompt_from_row({**ROW, "prompt": "1+1", "target": "\\boxed{2}"})
    assert plain.messages == prompt.messages and plain.traces[0].text == "\\boxed{2}"
    # A column beside the demonstrations may have any name.
    assert prompt_from_row({**ROW, "targte": "kept by the file's author"}).traces
    assert prompt_from_row({**ROW, "target": None, "question": "1+1"}).traces == ()
    traces = [{"text": "a", "author": "x"}, {"text": "b", "logprobs": [-0.5, 0]}]
    found = prompt_from_row({**ROW, "traces": traces}, author="y").traces
    assert [(t.text, t.author, t.logprobs) for t in found] == [("a", "x", None), ("b", "y", (-0.5, 0.0))]


def test_a_solution_at_the_end_of_a_prompt_is_a_trace():
    def asked(*turns, **more):
        prompt = [{"role": role, "content": content} for role, content in turns]
        return prompt_from_row({**ROW, "target": None, "prompt": prompt, **more}, "me")

    prompt = asked(("user", "a?"), ("assistant", "b"), ("tool", "c"), ("assistant", "d"))
    assert prompt.messages == (Message("user", "a?"),)
    assert [(len(trace.turns), trace.reply, trace.author) for trace in prompt.traces] == [(3, "d", "me")]
    again = asked(("user", "a?"), ("assistant", "b"), ("user", "c?"), ("assistant", "d"))
    assert [message.role for message in again.messages] == ["user", "assistant", "user"]
    assert [(trace.text, trace.turns) for trace in again.traces] == [("d", ())]
    assert len(asked(("user", "a?"), ("assistant", SOLUTION["content"]), target=[SOLUTION]).traces) == 1


@pytest.mark.parametrize(("style", "answer", "grader"), [
    ("rule", "2", None), ("choice", "2", "choice"), ("rule_2", "2", "rule_2"),
    *((style, 34, None) for style in (None, "rule", "rule-lighteval/MATH_v2", "rule-based")),  # verl's files
])  # fmt: skip
def test_the_style_names_the_grader_and_is_written_back(style, answer, grader):
    prompt = prompt_from_row({**ROW, "ability": None, "reward_model": {"style": style, "ground_truth": answer}})
    assert (prompt.grader, prompt.ability, prompt.ground_truth) == (grader, "math", str(answer))
    (row,) = record_batch([prompt]).to_pylist()
    assert row["reward_model"] == {"style": grader or "rule", "ground_truth": str(answer)}


def test_a_uid_may_be_a_number_or_missing_and_then_depends_on_where_one_message_ends():
    for uid, read in ((7, "7"), (7.0, "7"), (NAN, None), (None, None), ("x", "x")):
        prompt = prompt_from_row({**ROW, "uid": uid})
        assert prompt.uid == (read or prompt_uid("math", prompt.messages))
    split = prompt_uid("s", [Message("user", "ab"), Message("user", "c")])
    assert split != prompt_uid("s", [Message("user", "a"), Message("user", "bc")])


WRONG = {  # field: values of its column, and what is said of each
    "data_source": [(None, "missing"), (3, "must be text, found 3")],
    "uid": [("", "empty")], "ability": [("", "empty")], "extra_info": [("{", "not JSON"), ([1], "mapping")],
    "prompt": [(None, "missing"), ([], "empty"), (NUMPYS, "written as text, but not as JSON"),
               ([SOLUTION], "holds an assistant's message, and no user's")],
    "prompt[0]": [([7], "mapping")], "prompt[0].role": [([{"role": "boss", "content": "x"}], "must be one of")],
    "prompt[0].content": [
        ([{"role": "user", "content": text}], why) for text, why in (("  ", "empty"), ("\ud800", "UTF-16"))],
    "reward_model": [(None, "missing")],
    "reward_model.style": [({"style": style, "ground_truth": "2"}, why) for style, why in (
        ("model", "'rule'"), (3, "'rule'"), ("My Grader", "name"), ("Ruler", "name"))],
    "reward_model.ground_truth": [({"style": "rule", "ground_truth": truth}, why) for truth, why in (
        (["2"], "must be text"), (NAN, "missing"))],
    "target": [([{"role": "user", "content": "x"}], "one assistant message")],
    "traces[0].logprobs": [([{"text": "x", "logprobs": [0.5]}], "at most 0")],
    "traces[0].verified": [([{"text": "x", "verified": 1}], "true, false or null")],
    "traces[0].num_tokens": [([{"text": "x", "num_tokens": -1}], "at least 0")],
    "traces[0].model": [([{"text": "x", "model": 7}], "must be text")], "traces[0].text": [([{"text": ""}], "empty")],
}  # fmt: skip


@pytest.mark.parametrize(
    ("field", "value", "why"), [(field, *case) for field, cases in WRONG.items() for case in cases]
)
def test_the_first_wrong_field_is_named(field, value, why):
    with pytest.raises(RowError) as caught:
        prompt_from_row({**ROW, re.split(r"[.[]", field)[0]: value})
    assert caught.value.field == field and why in str(caught.value)


KEPT = {"traces": ({"column": "t", "keep_column": "ok"},)}
ANY_LABELS = {"column": "choices.text", "labels": "choices.label"}
APART = {"correct": "right", "incorrect": ("w1", "w2", "w3")}


def fields_of(**given):
    """Question, answer and traces in columns `q`, `a` and `t`, unless others are given."""
    choices = given.get("choices")
    answer = {} if isinstance(choices, dict) and "correct" in choices else {"answer": {"column": "a"}}
    traces = ({"column": "t", "author": "me"},)
    return FieldsConfig.model_validate({"data_source": "qa", "problem": "q", "traces": traces, **answer, **given})


def mapped(row, **fields):
    return prompt_from_fields({"q": "Which?", **row}, fields_of(**fields), author="someone")


def test_several_traces_with_flags_authors_and_logprobs():
    row = {"a": "2", "t": ["x", "y", "z"], "ok": [True, False, True], "p": [[-1.0], [], [-2]]}
    trace = {"column": "t", "author": "r1", "keep_column": "ok", "logprobs_column": "p"}
    found = mapped(row, traces=(trace,)).traces
    assert [(t.text, t.author, t.logprobs) for t in found] == [("x", "r1", (-1.0,)), ("z", "r1", (-2.0,))]
    for flag in ("true", "True", "TRUE ", True, "false", "False", None, False):  # which may be written as text
        kept = str(flag).strip().lower() == "true"
        assert len(mapped({"a": "2", "t": "x", "ok": flag}, **KEPT).traces) == kept
    # A solution at the end of the question is dropped where no traces are asked for.
    prompt = mapped({"q": [{"role": "user", "content": "a?"}, SOLUTION], "a": "2"}, traces=())
    assert (prompt.messages, prompt.traces) == ((Message("user", "a?"),), ())


def test_a_gsm8k_solution_gets_its_answer_into_a_box():
    row = {"t": "48/2 = <<48/2=24>>24 clips.\n#### 1,072", "a": "x #### y #### 1,072 "}
    prompt = mapped(row, answer={"column": "a", "after": "####"}, traces=({"column": "t", "rewrite": "gsm8k"},))
    assert prompt.ground_truth == "1,072"
    assert prompt.traces[0].text == "48/2 = 24 clips.\nThe answer is \\boxed{1,072}."
    assert prompt.traces[0].author == "someone"


@pytest.mark.parametrize(("row", "answer", "expected"), [
    ({"a": "so \\boxed{1} or \\boxed{\\frac{1}{2}}."}, {"boxed": True}, "\\frac{1}{2}"),
    ({"a": "['2', '3']"}, {"element": 0}, "2"), ({"a": ["2", "3"]}, {"element": -1}, "3"), ({"a": 27.0}, {}, "27"),
    ({"a": """ ["it's '2' '3'",\n '4']"""}, {"element": 0}, "it's '2' '3'"), ({"a": {"b": 5}}, {"column": "a.b"}, "5"),
])  # fmt: skip
def test_formats_of_answers(row, answer, expected):
    assert mapped(row, answer={"column": "a", **answer}).ground_truth == expected


@pytest.mark.parametrize(("row", "choices", "letter", "texts"), [
    ({"o": ["8", "7"], "a": "B"}, {"column": "o"}, "B", ["8", "7"]),
    ({"o": ["x", "y", "z"], "a": 2}, {"column": "o", "answer_is": "index"}, "C", ["x", "y", "z"]),
    ({"o": ["x", "y", "z"], "a": "y"}, {"column": "o", "answer_is": "text"}, "B", ["x", "y", "z"]),
    ({"o": "['x', 'y']", "a": "(B)."}, {"column": "o"}, "B", ["x", "y"]),
    ({"o": ["N/A", "x", "N/A", "y"], "a": "D"}, {"column": "o", "fillers": ("N/A",)}, "B", ["x", "y"]),
    ({"A": "x", "B": 7.0, "C": None, "a": "B"}, {"columns": ("A", "B", "C")}, "B", ["x", "7"]),
    *(({"choices": {"text": list(texts), "label": list(labels)}, "a": answer}, ANY_LABELS, letter, list(texts))
      for texts, labels, answer, letter in (
          ("wxyz", "ABCD", "C", "C"), ("wxyz", "1234", "3", "C"), ("xyz", "ABC", "A", "A"), ("vwxyz", "ABCDE", *"EE"))),
])  # fmt: skip
def test_formats_of_options_and_answers(row, choices, letter, texts):
    prompt = mapped(row, choices=choices)
    lines = [f"{label}. {text}" for label, text in zip("ABCDE", texts, strict=False)]
    assert prompt.messages == (Message("user", "\n".join(["Which?", "", *lines])),)
    assert (prompt.ground_truth, prompt.grader) == (letter, "choice")
    assert prompt.extra_info == {"options": texts, "num_options": len(texts)}
    assert without_options(prompt) == "Which?"
    for named, grader in (("exact", "exact"), ("rule", None)):
        assert mapped(row, choices=choices, grader=named).grader == grader


def test_the_order_is_that_of_the_question_and_not_of_the_columns_and_an_id_distinguishes_equal_ones():
    prompt = mapped({"right": "r", "w1": "a", "w2": "b", "w3": "c"}, choices=APART)
    other = mapped({"right": "r", "w1": "c", "w2": "a", "w3": "b"}, choices=APART)
    assert prompt == other
    assert prompt.extra_info["options"]["ABCD".index(prompt.ground_truth)] == "r"
    assert fixed_order("Which?", ["r", "a", "b", "c"]) == ["r", "b", "a", "c"]  # the same on every machine
    row = {"right": "yes", "w1": "no", "w2": "perhaps", "w3": "never"}
    found = Counter(mapped({**row, "q": f"Question {n}"}, choices=APART).ground_truth for n in range(400))
    assert set(found) == set("ABCD") and min(found.values()) > 60
    columns = columns_of(fields_of(id="n", choices=APART, extra=("s",), traces=()))
    assert columns == ["q", "right", "w1", "w2", "w3", "n", "s"]
    row = {"o": ["8", "7"], "a": "B"}
    one, two, again = (mapped({**row, "n": n}, choices={"column": "o"}, id="n") for n in (1, 2, 1))
    assert one.uid == again.uid != two.uid and one.messages == two.messages


def answered(**answer):
    return {"answer": {"column": "a", **answer}}


def options(**choices):
    return {"choices": {"column": "o", **choices}}


@pytest.mark.parametrize(("row", "fields", "column", "reason"), [
    ({"q": 3, "a": "2"}, {}, "q", "must be a list of messages"), ({"q": " ", "a": "2"}, {}, "q", "is empty"),
    ({"a": None}, {}, "a", "is missing"), ({"a": NAN}, {}, "a", "is missing"),
    ({"a": "2", "t": ["x", ""]}, {}, "t[1]", "is empty"), ({"a": "2", "t": 5}, {}, "t", "must be text"),
    ({"a": "2"}, answered(after="####"), "a", "holds no '####'"), ({"a": "2"}, answered(boxed=True), "a", "boxed"),
    ({"a": "2"}, answered(element=1), "a", "with an element 1"),
    ({"a": "['2' '3']"}, answered(element=0), "a", "must be a list"),
    ({"a": "['2'\n '3']"}, answered(element="all"), "a", "must be a list"),
    ({"a": [NAN, 2]}, answered(element="all"), "a", "is missing"),
    *(({"a": "2", "d": value}, {"extra": (column,)}, column, "cannot be written as JSON") for value, column in (
        (datetime.date(2024, 1, 1), "d"), ([decimal.Decimal(1)], "d"), ({"e": b"x"}, "d.e"))),
    ({"a": "2", "t": "x", "ok": "yes"}, KEPT, "ok", "must be true or false, found 'yes'"),
    ({"a": "2", "t": ["x"], "ok": [1]}, KEPT, "ok", "must be true or false, found '1'"),
    ({"o": ["x", "y"], "a": "C"}, options(), "a", "names none of the options"),
    ({"o": ["x", "y"], "a": "2"}, options(answer_is="index"), "a", "an index from 0 to 1"),
    ({"o": ["x", "x"], "a": "x"}, options(answer_is="text"), "a", "or several"),
    ({"o": ["x"], "a": "A"}, options(), "o", "2 to 26 options, found 1"),
    ({"o": "x", "a": "A"}, options(), "o", "must be a list of options"),
    ({"o": ["x", None], "a": "A"}, options(), "o[1]", "is missing"),
    ({"o": ["x", "N/A"], "a": "B"}, options(fillers=("N/A",)), "o", "found 1"),
    ({"o": ["x", "y", "N/A"], "a": "C"}, options(fillers=("N/A",)), "a", "that is a filler"),
    ({"choices": {"text": ["x", "y"], "label": ["A"]}, "a": "A"}, {"choices": ANY_LABELS}, "choices.label", "2 labels"),
    ({"right": "r", "w1": "r", "w2": "b", "w3": "c"}, {"choices": APART}, "right", "one of the incorrect"),
    ({"right": "r", "w1": "", "w2": "b", "w3": "c"}, {"choices": APART}, "w1", "is empty"),
])  # fmt: skip
def test_the_wrong_column_is_named(row, fields, column, reason):
    with pytest.raises(RowError) as caught:
        mapped(row, **fields)
    assert caught.value.field == column and reason in str(caught.value)


@pytest.mark.parametrize(("fields", "reason"), [
    ({"choices": {}}, "give one of column, columns, and correct"),
    ({"choices": {"correct": "c"}}, "correct and incorrect go together"),
    ({"choices": {"columns": ("a", "b"), "labels": "l"}}, "labels has no effect without column"),
    ({"choices": {"column": "o"}, "answer": None}, "answer: missing"),
    ({"choices": APART, **answered()}, "answer has no effect beside choices.correct"),
    ({"answer": None}, "answer: missing"), ({"grader": "Two words"}, "should match pattern"),
])  # fmt: skip
def test_fields_without_effect_or_sense_are_refused(fields, reason):
    with pytest.raises(ValidationError, match=reason):
        fields_of(**fields)


def quiz(question, *texts):
    return mapped({"q": question, "o": list(texts), "a": "A"}, choices={"column": "o"})


def test_responses_are_graded_by_letter_and_by_the_text_of_the_option(grader):
    prompt = quiz("Which?", "a bat", "a whale")
    replies = ["\\boxed{A}", "The answer is (a).", "\\boxed{a bat}", "ANSWER: B", "B or A"]
    grades = grader.grade([GradeRequest(reply, prompt.ground_truth, problem_of(prompt)) for reply in replies])
    right, wrong = Outcome.CORRECT, Outcome.WRONG
    assert [grade.outcome for grade in grades] == [right, right, right, wrong, Outcome.NO_ANSWER]


def test_a_question_is_found_in_training_data_with_without_and_with_other_options():
    rng = random.Random(0)
    question, *texts = (" ".join(str(rng.randrange(10**6)) for _ in range(30)) for _ in range(5))
    prompt, index = quiz(question, *texts), BenchmarkIndex()
    assert index.add("quiz", [quiz("Which of these barks?", "cat", "dog", "fish"), prompt]) == 2
    index.finish()
    found = index.equal(quiz("Which of these  barks?", "dog", "stone", "cat"))
    assert found is not None and (found.benchmark, found.row) == ("quiz", 1)
    assert index.equal(quiz("Which of these sings?", "cat", "dog", "fish")) is None
    for text in (question, prompt.messages[-1].content):
        assert index.equal(Prompt("u", "d", (Message("user", text),), "1"))
        (hit,) = index.find([f"They ask: {text} Well."])
        assert hit is not None and (hit.benchmark, hit.row, hit.share) == ("quiz", 2, 1.0)

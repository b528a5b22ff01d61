"""Reading one row, whatever a file holds."""

import pytest

from luffy.data.schema import RowError, prompt_from_row, prompt_uid, record_batch
from luffy.types import Message

ROW: dict[str, object] = {
    "data_source": "math",
    "prompt": [{"role": "user", "content": "1+1"}],
    "target": [{"role": "assistant", "content": "<think>\n</think>\n\\boxed{2}"}],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "2"},
    "extra_info": {"split": "default", "index": 0},
}


def test_a_row_of_luffy_becomes_a_prompt_with_one_trace() -> None:
    prompt = prompt_from_row(ROW, author="deepseek-r1")
    assert prompt.messages == (Message("user", "1+1"),)
    assert [trace.author for trace in prompt.traces] == ["deepseek-r1"]
    assert prompt.extra_info == {"split": "default", "index": 0}
    assert prompt.uid == prompt_uid("math", prompt.messages)
    plain = prompt_from_row({**ROW, "prompt": "1+1", "target": "\\boxed{2}"})
    assert plain.messages == prompt.messages and plain.traces[0].text == "\\boxed{2}"


def test_a_column_beside_the_demonstrations_may_have_any_name() -> None:
    assert prompt_from_row({**ROW, "targte": "kept by the file's author"}).traces
    assert prompt_from_row({**ROW, "target": None, "question": "1+1"}).traces == ()


def test_several_traces_keep_their_authors() -> None:
    traces = [{"text": "a", "author": "x"}, {"text": "b", "logprobs": [-0.5, 0]}]
    prompt = prompt_from_row({**ROW, "traces": traces}, author="y")
    assert [(trace.text, trace.author, trace.logprobs) for trace in prompt.traces] == [
        ("a", "x", None),
        ("b", "y", (-0.5, 0.0)),
    ]


@pytest.mark.parametrize(("style", "grader"), [("rule", None), ("choice", "choice"), ("rule_2", "rule_2")])
def test_the_style_names_the_grader_and_is_written_back(style: str, grader: str | None) -> None:
    prompt = prompt_from_row({**ROW, "reward_model": {"style": style, "ground_truth": "2"}})
    assert prompt.grader == grader
    (row,) = record_batch([prompt]).to_pylist()
    assert row["reward_model"] == {"style": style, "ground_truth": "2"}


@pytest.mark.parametrize("style", [None, "rule", "rule-lighteval/MATH_v2", "rule-based"])
def test_verls_files_are_read_as_they_are(style: str | None) -> None:
    prompt = prompt_from_row({**ROW, "ability": None, "reward_model": {"style": style, "ground_truth": 34}})
    assert (prompt.grader, prompt.ability, prompt.ground_truth) == (None, "math", "34")
    (row,) = record_batch([prompt]).to_pylist()
    assert row["reward_model"] == {"style": "rule", "ground_truth": "34"}


@pytest.mark.parametrize(("uid", "read"), [(7, "7"), (7.0, "7"), (float("nan"), None), (None, None), ("x", "x")])
def test_a_uid_may_be_a_number_or_missing(uid: object, read: str | None) -> None:
    prompt = prompt_from_row({**ROW, "uid": uid})
    assert prompt.uid == (read or prompt_uid("math", prompt.messages))


@pytest.mark.parametrize(
    ("change", "field", "reason"),
    [
        ({"data_source": None}, "data_source", "missing"),
        ({"data_source": 3}, "data_source", "must be text, found 3"),
        ({"prompt": None}, "prompt", "missing"),
        ({"prompt": []}, "prompt", "empty"),
        ({"prompt": [7]}, "prompt[0]", "mapping"),
        ({"prompt": [{"role": "boss", "content": "x"}]}, "prompt[0].role", "must be one of"),
        ({"prompt": [{"role": "user", "content": "  "}]}, "prompt[0].content", "empty"),
        ({"prompt": [{"role": "user", "content": "\ud800"}]}, "prompt[0].content", "UTF-16"),
        ({"reward_model": None}, "reward_model", "missing"),
        ({"reward_model": {"style": "model", "ground_truth": "2"}}, "reward_model.style", "'rule'"),
        ({"reward_model": {"style": "My Grader", "ground_truth": "2"}}, "reward_model.style", "name"),
        ({"reward_model": {"style": 3, "ground_truth": "2"}}, "reward_model.style", "'rule'"),
        ({"reward_model": {"style": "rule", "ground_truth": ["2"]}}, "reward_model.ground_truth", "must be text"),
        ({"reward_model": {"style": "rule", "ground_truth": float("nan")}}, "reward_model.ground_truth", "missing"),
        ({"reward_model": {"style": "Ruler", "ground_truth": "2"}}, "reward_model.style", "name"),
        ({"ability": ""}, "ability", "empty"),
        ({"target": [{"role": "user", "content": "x"}]}, "target", "one assistant message"),
        ({"traces": [{"text": ""}]}, "traces[0].text", "empty"),
        ({"traces": [{"text": "x", "logprobs": [0.5]}]}, "traces[0].logprobs", "at most 0"),
        ({"traces": [{"text": "x", "verified": 1}]}, "traces[0].verified", "true, false or null"),
        ({"traces": [{"text": "x", "num_tokens": -1}]}, "traces[0].num_tokens", "at least 0"),
        ({"traces": [{"text": "x", "model": 7}]}, "traces[0].model", "must be text"),
        ({"extra_info": "{"}, "extra_info", "not JSON"),
        ({"extra_info": [1]}, "extra_info", "mapping"),
        ({"uid": ""}, "uid", "empty"),
    ],
)
def test_the_first_wrong_field_is_named(change: dict[str, object], field: str, reason: str) -> None:
    with pytest.raises(RowError, match=reason.replace("(", r"\(")) as caught:
        prompt_from_row({**ROW, **change})
    assert caught.value.field == field


def test_the_uid_depends_on_where_one_message_ends() -> None:
    split = prompt_uid("s", [Message("user", "ab"), Message("user", "c")])
    assert split != prompt_uid("s", [Message("user", "a"), Message("user", "bc")])

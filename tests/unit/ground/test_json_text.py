"""JSON of others is read up to a depth that is counted beforehand; what is nested deeper is one error."""

import ast
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import luffy
from luffy.json_text import MAX_DEPTH, NestedTooDeep, parse_json, refuse_deep

OWN_TEXT = {
    # What luffy's own processes write: to each other, and into their own files.
    "bubblewrap.py", "chain_page.py",
    "checkpoint.py", "checks.py",
    "events.py", "form.py", "interpreter.py", "reasoning_gym_score.py", "request.py",
    "sample_files.py", "shards.py", "splits.py", "store.py",
    "identity.py",
    # A tokenizer that its library has read and written again.
    "tokenizer.py",
    # In the interpreter of an environment, which has no luffy.
    "classic_environments.py", "exchange.py",
    "json_text.py",
}  # fmt: skip
PLAIN = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(alphabet='[]{}"\\a:,')


@pytest.mark.parametrize("opening", ["[", '{"a":', '[{"[": ', '{"\\"[": ['])
@pytest.mark.parametrize("times", [MAX_DEPTH + 1, 20_000, 200_000])
def test_deep_text_is_refused_with_its_depth_and_the_limit(opening, times):
    levels = opening.replace('"["', "").replace('"\\"["', "")
    depth = times * (levels.count("[") + levels.count("{"))
    with pytest.raises(NestedTooDeep, match=f"{depth} levels, at most 100 are read"):
        parse_json(opening * times)


def test_the_limit_itself_is_read():
    text = "[" * MAX_DEPTH + "]" * MAX_DEPTH
    assert json.dumps(parse_json(text)) == text == json.dumps(parse_json(text.encode("utf-16")))


def test_only_the_value_that_begins_there_counts():
    refuse_deep("[" * 200 + '{"a": 1}' + "[" * 200, 200)
    with pytest.raises(NestedTooDeep):
        refuse_deep("x" + "[" * 200, 1)


@given(st.recursive(PLAIN, lambda below: st.lists(below) | st.dictionaries(st.text(alphabet='[{"\\'), below)))
def test_brackets_within_strings_do_not_count(value):
    assert parse_json(json.dumps([value] * 40)) == [value] * 40
    assert parse_json(json.dumps("[" * 500)) == "[" * 500


def test_nothing_else_in_luffy_reads_json_of_others():
    readers = {
        path.name
        for path in Path(luffy.__file__).parent.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("json.loads", "json.load")
    }
    assert readers <= OWN_TEXT, f"read with luffy.json_text.parse_json: {sorted(readers - OWN_TEXT)}"

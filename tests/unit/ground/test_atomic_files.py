"""Files are whole or not at all, JSON is read up to a depth that is counted before, and seeds are pure functions."""

import ast
import json
import resource
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import luffy
from luffy.files import LineAppender, clone_or_copy, link_or_copy, replacing, write_atomic
from luffy.json_text import MAX_DEPTH, NestedTooDeep, parse_json, refuse_deep
from luffy.seeds import derive_seed


def test_a_new_text_takes_the_place_of_the_old_and_a_failed_write_leaves_it_and_nothing_else(tmp_path):
    target = tmp_path / "a.txt"
    for text in ("old", "neu: ä"):
        write_atomic(target, text)
        assert target.read_text(encoding="utf-8") == text
    with pytest.raises(KeyboardInterrupt), replacing(target) as file:
        file.write(b"half of the n")
        raise KeyboardInterrupt
    assert target.read_text(encoding="utf-8") == "neu: ä"
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


@pytest.mark.parametrize("place", [link_or_copy, clone_or_copy])
def test_a_link_or_copy_replaces_what_was_there_and_a_copy_is_a_file_of_its_own(tmp_path, place):
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_text("new")
    target.write_text("old, and longer")
    place(str(source), str(target))
    assert target.read_text() == "new"
    source.write_text("newest")
    assert target.read_text() == ("newest" if place is link_or_copy else "new")


def test_a_line_that_does_not_fit_is_an_error_and_spoils_no_other_nor_does_one_that_a_kill_has_torn(tmp_path):
    """The limit ends a write within the line, as a disk does whose last block is taken."""
    path, limits = tmp_path / "lines", resource.getrlimit(resource.RLIMIT_FSIZE)
    lines = LineAppender(path)
    lines.append(b"one")
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 2, limits[1]))
    try:
        for _ in range(2):
            with pytest.raises(OSError, match="File too large"):
                lines.append(b"two, which is longer")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_bytes() == b"one\ntw"
    for appender in (lines, LineAppender(path)):  # the second as after a kill
        path.write_bytes(b"one\ntw")
        appender.append(b"three")
        appender.append(b"four")
        assert path.read_bytes() == b"one\ntw\nthree\nfour\n"


OWN_TEXT = """
bubblewrap chain_page checkpoint checks events form identity interpreter request sample_files shards store
tokenizer
classic_environments exchange
json_text
"""
"""Modules that read what luffy's own processes write; what the tokenizer's library has written again; what is in the
interpreter of an environment, which has no luffy; and the one that reads for all others."""
PLAIN = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(alphabet='[]{}"\\a:,')


@pytest.mark.parametrize("opening", ["[", '{"a":', '[{"[": ', '{"\\"[": ['])
@pytest.mark.parametrize("times", [MAX_DEPTH + 1, 20_000, 200_000])
def test_deep_text_is_refused_with_its_depth_and_the_limit(opening, times):
    levels = opening.replace('"["', "").replace('"\\"["', "")
    depth = times * (levels.count("[") + levels.count("{"))
    with pytest.raises(NestedTooDeep, match=f"{depth} levels, at most 100 are read"):
        parse_json(opening * times)


def test_the_limit_itself_is_read_and_only_the_value_that_begins_there_counts():
    text = "[" * MAX_DEPTH + "]" * MAX_DEPTH
    assert json.dumps(parse_json(text)) == text == json.dumps(parse_json(text.encode("utf-16")))
    refuse_deep("[" * 200 + '{"a": 1}' + "[" * 200, 200)
    with pytest.raises(NestedTooDeep):
        refuse_deep("x" + "[" * 200, 1)


@given(st.recursive(PLAIN, lambda below: st.lists(below) | st.dictionaries(st.text(alphabet='[{"\\'), below)))
def test_brackets_within_strings_do_not_count(value):
    assert parse_json(json.dumps([value] * 40)) == [value] * 40
    assert parse_json(json.dumps("[" * 500)) == "[" * 500


def test_nothing_else_in_luffy_reads_json_of_others():
    readers = {
        path.stem
        for path in Path(luffy.__file__).parent.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("json.loads", "json.load")
    }
    assert readers <= {*OWN_TEXT.split()}, f"to be read with luffy.json_text.parse_json: {sorted(readers)}"


def test_a_seed_never_changes_between_versions_and_every_part_and_its_type_counts():
    assert derive_seed(0, "rollout", 1, "uid", 2) == 2160558809908254791
    assert 0 <= derive_seed(0) < 2**63
    seeds = [derive_seed(1, 2), derive_seed(12), derive_seed("1", 2), derive_seed(2, 1), derive_seed(1, 2, 0)]
    assert len(set(seeds)) == len(seeds)

"""Prompts in files: the layouts of other systems, what is quarantined or refused, prepared prompts on disk, and files
from strangers."""

import functools
import json
import tempfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.refusals import refused
from synthetic.loaded_source import load_file, write_rows
from synthetic.preparation import SMALL, prepare, row, sources_of

from luffy.cli import main as command
from luffy.config.data import FileSource
from luffy.data import parquet
from luffy.data.parquet import read_prompts, read_rows, write_prompts
from luffy.data.schema import SCHEMA, RowError, check_json
from luffy.data.sources import open_source
from luffy.errors import DataError
from luffy.evaluation import sample_files
from luffy.types import Message, Prompt, Trace


def user(text):
    return {"role": "user", "content": text}


def assistant(n):
    return {"role": "assistant", "content": f"<think>\nIt is {n}.\n</think>\nSo \\boxed{{{n}}}."}


def reward(answer, style="rule"):
    return {"style": style, "ground_truth": answer}


def sum_row(number):
    """Luffy's own columns."""
    return row(f"{number}+1", f"\\boxed{{{number + 1}}}", str(number + 1))


LAYOUTS = {  # file: its row n, how many of ten prompts pass, and how many traces
    "trl_messages.parquet": (lambda n: {"messages": [user(f"tm {n}?"), assistant(n)], "source": "x"}, 10, 10),
    "trl_completion.jsonl": (lambda n: {"prompt": [user(f"tc {n}?")], "completion": [assistant(n)]}, 10, 10),
    "trl_deepmath.parquet": (lambda n: {"prompt": [user(f"td {n}?")], "solution": f"${n}$"}, 10, 0),
    "open_r1_220k.parquet": (lambda n: {
        "problem": f"or {n}?", "solution": "A long way.", "answer": str(n), "problem_type": "Algebra",
        "source": "olympiads", "uuid": f"u{n}", "is_reasoning_complete": [True, n < 5], "correctness_count": 2,
        "generations": [assistant(n)["content"], assistant(n)["content"] + " "], "finish_reasons": None,
        "messages": [user(f"or {n}?"), assistant(n)],
    }, 10, 15),
    "prime_rl.parquet": (lambda n: {
        "problem_id": f"p{n}", "task_type": "verifiable_math", "prompt": f"pr {n}?",
        "verification_info": json.dumps({"ground_truth": f"\\frac{{{n}}}{{7}}"}), "solve_rate": 0.5,
    }, 10, 0),
    "synthetic_1.csv": (lambda n: {"prompt": f"sy {n}?", "verification_info": str({"ground_truth": n})}, 10, 0),
    "openrlhf.jsonl": (lambda n: {"input": f"of {n}?", "label": str(n), "datasource": "gsm"}, 10, 0),
    "openrlhf_messages.jsonl": (lambda n: {"context_messages": [user(f"om {n}?")], "answer": n}, 10, 0),
    "dapo_17k.parquet": (lambda n: {  # five problems twice: those are merged later
        "data_source": "dapo_17k", "prompt": [user(f"da {n // 2}?")], "ability": "MATH",
        "reward_model": reward(str(n // 2), "rule-lighteval/MATH_v2"), "extra_info": {"index": f"i{n}"},
    }, 10, 0),
    "numina_cot.parquet": (lambda n: {
        "source": "cn_k12", "problem": f"nc {n}?", "messages": [user(f"nc {n}?"), assistant(n)],
        "solution": f"It is $\\boxed{{{n}}}$." if n < 8 else "Proved.",
    }, 8, 8),
    "numina_15.parquet": (lambda n: {
        "problem": f"n5 {n}?", "solution": "Without a box.", "problem_type": "Algebra", "source": "olympiads",
        "answer": ("proof", "notfound", "")[n] if n < 3 else str(n), "synthetic": False,
    }, 7, 0),
    "deepscaler.jsonl": (lambda n: {"problem": f"ds {n}?", "answer": n, "solution": "" if n else "x"}, 10, 0),
    "gsm8k.jsonl": (lambda n: {"question": f"gs {n}?", "answer": f"2*{n}\n#### {n}"}, 10, 10),
    "luffy.parquet": (lambda n: {
        "data_source": "luffy", "prompt": [{"role": "system", "content": "Think."}, user(f"lu {n}?")],
        "target": [assistant(n)], "ability": "math", "reward_model": reward(str(n)),
        "extra_info": {"index": n, "split": "default"},
    }, 10, 10),
    "verl.csv": (lambda n: {
        "uid": f"verl-{n}", "data_source": "verl", "prompt": json.dumps([user(f"ve {n}?")]), "ability": "math",
        "reward_model": str(reward(str(n))), "extra_info": json.dumps({"index": n}),
    }, 10, 0),
    "prompt_text.csv": (lambda n: {"prompt": json.dumps([user(f"pt {n}?"), assistant(n)])}, 10, 10),
    "solutions.jsonl": (lambda n: {"question": f"so {n}?", "solutions": [f"\\boxed{{{n}}}"]}, 10, 0),
    "sharegpt.jsonl": (lambda n: {
        "conversations": [{"from": "human", "value": f"sg {n}?"}, {"from": "gpt", "value": f"\\boxed{{{n}}}"}],
    }, 10, 10),
}  # fmt: skip


def test_ten_rows_of_each_layout_are_prepared_without_fields(tmp_path):
    parts = {}
    for name, (row_of, _, _) in LAYOUTS.items():
        file = write_rows(tmp_path / name, *map(row_of, range(10)))
        parts[Path(name).stem] = {"source": {"kind": "file", "path": str(file), "author": Path(name).stem}}
    train = {"kind": "mixture", "parts": parts}
    prepare(tmp_path / "out", train=train, suites={"small": SMALL}, max_trace_tokens=5000)
    card = sources_of(tmp_path / "out")["train"]
    assert card["data_sources"] == {Path(name).stem: count for name, (_, count, _) in LAYOUTS.items()}
    assert card["trace_authors"] == {Path(name).stem: count for name, (_, _, count) in LAYOUTS.items() if count}
    assert (card["folded"], card["rejected"]) == (0, {"duplicate_uid": 5, "reference_fails": 2})
    assert (card["quarantined"], card["malformed"]) == (3, {"solution": 2, "answer": 1})
    prompts = read_prompts(tmp_path / "out" / "train.parquet")
    assert {prompt.messages[-1].role for prompt in prompts} == {"user"}
    assert not any("\\boxed" in message.content for prompt in prompts for message in prompt.messages)
    assert [p.uid for p in prompts if p.data_source == "verl"] == [f"verl-{n}" for n in range(10)]


BESIDE = (
    "reasoning_content", "thinking", "weight", "loss_mask", "tool_calls", "tools", "images", "instruction", "input",
    "output", "system", "context", "completion", "answer",
)  # fmt: skip
"""Columns that mean something elsewhere."""


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_column_beside_a_known_layout_is_used_or_named(tmp_path, name):
    rows = [LAYOUTS[name][0](n) for n in range(10)]
    plain = load_file(write_rows(tmp_path / f"plain_{name}", *rows)).prompts
    for column in (column for column in BESIDE if column not in rows[0]):
        source = FileSource(kind="file", path=str(write_rows(tmp_path / name, *({**row, column: "7"} for row in rows))))
        try:
            opened = open_source(source, "train", 0)
            found = list(opened.rows())
        except DataError as error:
            assert column in str(error), error
            continue
        malformed = {row.field for row in found if not isinstance(row, Prompt)}
        texts = [[(p.messages, p.ground_truth, [t.reply for t in p.traces]) for p in some if isinstance(p, Prompt)]
                 for some in (plain, found)]  # fmt: skip
        assert column in opened.unread or column in malformed or texts[0] != texts[1], (column, malformed)


@pytest.mark.parametrize(("row", "line"), [
    ({"text": "a?", "answer": "2"}, '"problem": "COLUMN", "answer": {"column": "answer"}}'),
    ({"question": "a?", "chosen": "2"}, '"problem": "question", "answer": {"column": "COLUMN"}}'),
    ({"question": "a?", "answer": "B", "options": ["1", "2"]}, '"choices": {"column": "options"}}'),
    ({"question": "a?", "answer": "A long explanation. " * 20}, '"answer": {"column": "COLUMN"}}'),
])  # fmt: skip
def test_other_columns_are_refused_with_the_line_of_fields_to_give(tmp_path, row, line):
    with refused("d.jsonl", line, error=DataError):
        load_file(write_rows(tmp_path / "d.jsonl", *[row] * 3))


def test_exported_traces_are_read_again_and_no_confidential_one(tmp_path, capsys):
    text = 'A "quoted",\nlong' + "\u2028" + "line"
    turns = (Message("assistant", "call"), Message("tool", "2"), Message("assistant", "\\boxed{2}"))
    one = (Trace("\\boxed{1}", "r1", True, (-0.5, 0.0)),)
    prompts = [
        Prompt("u1", "d", (Message("system", "s"), Message("user", text)), "2", extra_info={"level": 3, "x": [text]}),
        Prompt("007", "", (Message("user", "b?"),), "1e5", one, grader="exact"),
        Prompt("u3", "d", (Message("user", "c?"),), "2", (Trace("call\n2\n\\boxed{2}", "r2", None, turns=turns),)),
        Prompt("secret", "d", (Message("user", "d?"),), "2", one, extra_info={"confidential": True}),
    ]
    write_prompts(tmp_path / "d.parquet", prompts)
    assert command.main(["export", str(tmp_path / "d.parquet"), str(tmp_path / "all.parquet")]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "2 prompts with 2 traces (1 of r1, 1 of r2)" in said and "1 prompts are confidential" in said
    assert load_file(tmp_path / "all.parquet").prompts == prompts[1:3]
    by_r1 = ["export", str(tmp_path / "d.parquet"), str(tmp_path / "r1.parquet"), "--author", "r1"]
    assert command.main(by_r1) == 0
    assert [prompt.uid for prompt in load_file(tmp_path / "r1.parquet").prompts] == ["007"]
    assert command.main(by_r1) == 2


def test_malformed_lines_are_quarantined_with_line_field_and_reason_and_files_of_a_pattern_read_by_name(tmp_path):
    lines = [
        b"\xef\xbb\xbf" + json.dumps(sum_row(0)).encode(),
        b'{"data_source": "caf\xe9"}',
        b"",
        b"{not json",
        b"[1]",
        json.dumps({**sum_row(1), "reward_model": {}}).encode(),
        json.dumps({**sum_row(1), "data_source": "\ud800"}).encode(),
        json.dumps(sum_row(2)).encode(),
    ]
    (tmp_path / "b.jsonl").write_bytes(b"\n".join(lines))
    loaded = load_file(tmp_path / "b.jsonl")
    assert [prompt.ground_truth for prompt in loaded.prompts] == ["1", "3"]
    found = [(bad.row, bad.field) for bad in loaded.quarantined]
    assert found == [(2, "(line)"), (4, "(line)"), (5, "(line)"), (6, "reward_model.ground_truth"), (7, "data_source")]
    assert "not UTF-8 text (byte 21: 0xe9)" in loaded.quarantined[0].reason
    write_rows(tmp_path / "a.jsonl", sum_row(5))
    assert [prompt.ground_truth for prompt in load_file(tmp_path / "*.jsonl").prompts] == ["6", "1", "3"]


def test_undecodable_text_and_a_key_given_twice_lose_only_their_rows_and_maps_are_mappings(tmp_path):
    """Spark and DuckDB write maps where others write structs."""
    of_text = pa.map_(pa.string(), pa.string())
    numbers, first = range(4), [("split", "test")]
    messages = [[[("role", "user"), ("content", f"{number}?")]] for number in numbers]
    columns = {
        "data_source": pa.array([b"math", b"\xff\xfe", b"math", b"math"], pa.binary()).view(pa.string()),
        "prompt": pa.array(messages, pa.list_(of_text)),
        "extra_info": pa.array([first, first, [("a", "b"), ("a", "c")], []], of_text),
    }
    table = pa.Table.from_pylist([sum_row(number) for number in numbers]).drop_columns(["data_source", "prompt"])
    for name, column in columns.items():
        table = table.append_column(name, column)
    pq.write_table(table, tmp_path / "d.parquet")
    loaded = load_file(tmp_path / "d.parquet")
    found = [(prompt.messages[0].content, prompt.ground_truth, prompt.extra_info) for prompt in loaded.prompts]
    assert found == [("0?", "1", {"split": "test"}), ("3?", "4", {})]
    assert [(bad.row, bad.field) for bad in loaded.quarantined] == [(2, "data_source"), (3, "extra_info")]


@pytest.mark.parametrize(("name", "content", "named"), [
    ("missing.jsonl", None, "no such file"), ("folder.jsonl", None, "is a directory"),
    ("d.txt", "x", "extension '.txt'; use one of .parquet, .jsonl, .csv"), ("none-*.jsonl", None, "no such file"),
    ("d.jsonl", "", "holds no row"),
    ("d.jsonl", "{}\n[]", "none of its 2 rows can be used; the first: row 1, field data_source: is missing"),
    ("d.parquet", "x", "no readable parquet"),
    ("d.parquet", None, "d.parquet: cannot be read after row 1"),  # damaged in its second half
])  # fmt: skip
def test_an_unusable_file_is_refused(tmp_path, name, content, named):
    (tmp_path / "folder.jsonl").mkdir()
    if content is not None:
        (tmp_path / name).write_text(content)
    elif name == "d.parquet":
        table = pa.table({"prompt": [str(n) * 50 for n in range(2000)], "answer": ["2"] * 2000})
        pq.write_table(table, tmp_path / name, row_group_size=1000, compression="zstd", use_dictionary=False)
        column = pq.read_metadata(tmp_path / name).row_group(1).column(0)
        damaged, start = bytearray((tmp_path / name).read_bytes()), column.data_page_offset
        damaged[start : start + column.total_compressed_size] = bytes(column.total_compressed_size)
        (tmp_path / name).write_bytes(damaged)
    with refused(name, named, error=DataError):
        load_file(tmp_path / name)


any_text = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12).filter(str.strip)
numbers = st.integers(-(2**60), 2**60) | st.floats(allow_nan=False, allow_infinity=False)
any_json = st.recursive(
    st.none() | st.booleans() | numbers | any_text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(any_text, inner, max_size=3),
    max_leaves=5,
)
any_logprobs = st.none() | st.lists(st.floats(-1e6, 0.0, allow_nan=False), max_size=4).map(tuple)
any_trace = st.builds(Trace, any_text, any_text, st.sampled_from([None, True, False]), any_logprobs)
any_turns = st.lists(st.builds(Message, st.sampled_from(["user", "assistant"]), any_text), max_size=2)
any_prompt = st.builds(
    Prompt,
    uid=any_text,
    data_source=any_text,
    messages=any_turns.map(lambda turns: (*turns, Message("user", "?"))),
    ground_truth=any_text,
    traces=st.lists(any_trace, max_size=3).map(tuple),
    ability=any_text,
    extra_info=st.dictionaries(any_text, any_json, max_size=3),
)


def prompt(uid):
    return Prompt(uid, "math", (Message("user", "1+1"),), "2", (Trace("\\boxed{2}", "me"),))


@settings(deadline=None, max_examples=60)
@given(st.lists(any_prompt, max_size=5))
def test_written_prompts_are_read_back(prompts):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "prompts.parquet"
        assert write_prompts(path, prompts) == len(prompts)
        assert read_prompts(path) == prompts


def test_equal_prompts_make_equal_files_with_the_columns_of_verl_and_a_wrong_row_is_named(tmp_path):
    for name in ("a", "b"):
        write_prompts(tmp_path / name, (prompt(str(number)) for number in range(100)))
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    first = pq.read_table(tmp_path / "a").to_pylist()[0]
    assert first["target"] == [{"role": "assistant", "content": "\\boxed{2}"}]
    assert first["reward_model"] == {"style": "rule", "ground_truth": "2"}
    turns = {"prompt": [user("1+1")], "target": None, "uid": "u", "extra_info": "{}"}
    rows = [{**row("", None), **turns, "ability": ability} for ability in ("math", "")]
    pq.write_table(pa.Table.from_pylist(rows, SCHEMA), tmp_path / "p.parquet")
    with refused("p.parquet, row 2, field ability", "is empty", error=DataError):
        read_prompts(tmp_path / "p.parquet")


def test_a_broken_write_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "p.parquet"
    write_prompts(path, [prompt("old")])

    def breaking():
        yield prompt("new")
        raise RuntimeError("interrupted")

    with pytest.raises(RuntimeError):
        write_prompts(path, breaking())  # type: ignore[arg-type]
    assert [found.uid for found in read_prompts(path)] == ["old"]
    assert [found.name for found in tmp_path.iterdir()] == ["p.parquet"]


# Files from strangers: no bomb is unfolded, no size is believed, and no text becomes a path.

WIDE = pa.schema([("prompt", pa.string()), ("turns", pa.list_(pa.struct([("content", pa.string())])))])


def rows_of(path):
    return list(read_rows(path, ["prompt", "turns"], ["prompt"]))


@pytest.mark.parametrize("compression", ["zstd", "gzip"])
def test_a_parquet_bomb_is_refused_before_it_unfolds(tmp_path, compression):
    path = tmp_path / "bomb.parquet"
    table = pa.table({"prompt": pa.array(["A" * (80 << 20)], pa.string())})
    pq.write_table(table, path, compression=compression, use_dictionary=compression == "zstd")
    assert path.stat().st_size < 1 << 20
    before = pa.total_allocated_bytes()
    with refused("bomb.parquet: column prompt expands from", "bomb", error=DataError):
        rows_of(path)
    assert pa.total_allocated_bytes() - before < 16 << 20


def test_distinct_values_that_each_row_repeats_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(parquet, "_MAX_DICTIONARY_BYTES", 1000)
    text = "".join(map(chr, range(0x4E00, 0x4E00 + 2000)))
    pq.write_table(pa.table({"prompt": [text] * 50}), tmp_path / "p.parquet", compression="none")
    with refused("column prompt has a dictionary of", "without dictionaries", error=DataError):
        rows_of(tmp_path / "p.parquet")
    pq.write_table(pa.table({"prompt": [text] * 50}), tmp_path / "p.parquet", use_dictionary=False)
    assert len(rows_of(tmp_path / "p.parquet")) == 50


@pytest.mark.parametrize("type_", [pa.timestamp("us"), pa.date32(), pa.timestamp("us", tz="Mars/Phobos")])
def test_a_value_that_python_does_not_have_is_one_bad_row(tmp_path, type_):
    dates = pa.array([None, 2**60 if type_ == pa.timestamp("us") else 10**7], type_)
    pq.write_table(pa.table({"prompt": ["a", "b"], "turns": dates}), tmp_path / "p.parquet")
    good, bad = rows_of(tmp_path / "p.parquet")
    assert good == {"prompt": "a", "turns": None}
    assert isinstance(bad, RowError) and (bad.field, bad.reason[:14]) == ("turns", "cannot be read")


@pytest.mark.parametrize("limit", [1, 4000, 1 << 20])
def test_large_nested_texts_are_read_a_few_rows_at_a_time_unchanged(tmp_path, monkeypatch, limit):
    """Larger batches of nested texts are what Arrow cannot put into one array."""
    rows = [{"prompt": f"p{n}", "turns": [{"content": str(n) * 500}] * (n % 4)} for n in range(60)]
    pq.write_table(pa.Table.from_pylist(rows, WIDE), tmp_path / "p.parquet", row_group_size=25)
    monkeypatch.setattr(parquet, "_READ_BYTES", limit)
    seen: list[int] = []
    decoded = parquet.decoded
    monkeypatch.setattr(parquet, "decoded", lambda batch: (seen.append(batch.num_rows), decoded(batch))[1])
    assert rows_of(tmp_path / "p.parquet") == rows
    assert max(seen) == {1: 1, 1 << 20: 25}.get(limit, max(seen)) and sum(seen) == 60


def test_sizes_that_a_file_only_claims_end_in_one_line(tmp_path):
    path = tmp_path / "p.parquet"
    pq.write_table(pa.table({"prompt": ["x" * 1000] * 10}), path, use_dictionary=False)
    content = bytearray(path.read_bytes())
    for place in range(8, len(content) - 8, 3):  # lengths and offsets in pages and footer
        damaged = content.copy()
        damaged[place] ^= 0xFF
        path.write_bytes(damaged)
        try:
            rows_of(path)
        except DataError as error:
            assert "\n" not in str(error)


@pytest.mark.parametrize("name", ["../../outside", "/etc/outside", "..", "a/../../outside", "C:\\outside", "x\x00y"])
def test_names_in_data_are_text_and_never_paths(tmp_path, name):
    (tmp_path / "workspace").mkdir()
    prompt = Prompt(name, name, (Message("user", name),), name, (Trace(name, name),), extra_info={"file": name})
    write_prompts(tmp_path / "workspace" / "p.parquet", [prompt])
    assert read_prompts(tmp_path / "workspace" / "p.parquet") == [prompt]
    assert [path.name for path in tmp_path.rglob("*")] == ["workspace", "p.parquet"]


def test_a_line_that_unfolds_from_little_is_no_record(tmp_path, monkeypatch):
    codec = pa.Codec("zstd", compression_level=3)
    content = codec.compress(b"x" * (64 << 20), asbytes=True)
    (tmp_path / "samples.jsonl.zst").write_bytes(content)
    monkeypatch.setattr(sample_files, "_MAX_LINE_BYTES", 1 << 20)
    before = pa.total_allocated_bytes()
    with pytest.raises(DataError, match="a line is longer than 1048576 bytes"):
        list(sample_files.read_samples_of(tmp_path))
    assert len(content) < 1 << 14 and pa.total_allocated_bytes() - before < 16 << 20


def test_a_row_of_absurd_depth_or_length_is_quarantined_and_the_others_are_read(tmp_path):
    row = {"prompt": "1+1?", "data_source": "t", "reward_model": {"ground_truth": "2"}}
    fields = json.dumps(row)[:-1]
    lines = [
        '{"prompt": ' + "9" * 6000 + "}",
        "[" * 200_000,
        f'{fields}, "extra_info": {{"a": {"[" * 101}{"]" * 101}}}}}',
        json.dumps({**row, "extra_info": '{"a": ' + "[" * 50_000}),
        json.dumps(row),
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    loaded = load_file(tmp_path / "rows.jsonl")
    assert [bad.row for bad in loaded.quarantined] == [1, 2, 3, 4] and len(loaded.prompts) == 1
    assert all("nested too deep" in bad.reason for bad in loaded.quarantined[1:])
    for levels in (150, 5000):  # which could not be read again
        nested = functools.reduce(lambda inner, _: [inner], range(levels), 1)
        with pytest.raises(RowError, match=r"cannot be written as JSON: .*(nested too deep|recursion)"):
            check_json({"a": nested}, "extra_info")

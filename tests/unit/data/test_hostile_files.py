"""Data files from strangers: no bomb is unfolded, no size is believed, and no text becomes a path."""

import functools
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.refusals import refused
from synthetic.loaded_source import load_file

from luffy.data import parquet
from luffy.data.parquet import read_prompts, read_rows, write_prompts
from luffy.data.schema import RowError, check_json
from luffy.errors import DataError
from luffy.evaluation import sample_files
from luffy.types import Message, Prompt, Trace

WIDE = pa.schema([("prompt", pa.string()), ("turns", pa.list_(pa.struct([("content", pa.string())])))])


def rows_of(path: Path) -> list[object]:
    return list(read_rows(path, ["prompt", "turns"], ["prompt"]))


@pytest.mark.parametrize("compression", ["zstd", "gzip"])
def test_a_parquet_bomb_is_refused_before_it_unfolds(tmp_path: Path, compression: str) -> None:
    path = tmp_path / "bomb.parquet"
    table = pa.table({"prompt": pa.array(["A" * (80 << 20)], pa.string())})
    pq.write_table(table, path, compression=compression, use_dictionary=compression == "zstd")
    assert path.stat().st_size < 1 << 20
    before = pa.total_allocated_bytes()
    with refused("bomb.parquet: column prompt expands from", "bomb", error=DataError):
        rows_of(path)
    assert pa.total_allocated_bytes() - before < 16 << 20


def test_distinct_values_that_each_row_repeats_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet, "_MAX_DICTIONARY_BYTES", 1000)
    text = "".join(map(chr, range(0x4E00, 0x4E00 + 2000)))
    pq.write_table(pa.table({"prompt": [text] * 50}), tmp_path / "p.parquet", compression="none")
    with refused("column prompt has a dictionary of", "without dictionaries", error=DataError):
        rows_of(tmp_path / "p.parquet")
    pq.write_table(pa.table({"prompt": [text] * 50}), tmp_path / "p.parquet", use_dictionary=False)
    assert len(rows_of(tmp_path / "p.parquet")) == 50


@pytest.mark.parametrize("type_", [pa.timestamp("us"), pa.date32(), pa.timestamp("us", tz="Mars/Phobos")])
def test_a_value_that_python_does_not_have_is_one_bad_row(tmp_path: Path, type_: pa.DataType) -> None:
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


def test_sizes_that_a_file_only_claims_end_in_one_line(tmp_path: Path) -> None:
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
def test_names_in_data_are_text_and_never_paths(tmp_path: Path, name: str) -> None:
    (tmp_path / "workspace").mkdir()
    prompt = Prompt(name, name, (Message("user", name),), name, (Trace(name, name),), extra_info={"file": name})
    write_prompts(tmp_path / "workspace" / "p.parquet", [prompt])
    assert read_prompts(tmp_path / "workspace" / "p.parquet") == [prompt]
    assert [path.name for path in tmp_path.rglob("*")] == ["workspace", "p.parquet"]


def test_a_line_that_unfolds_from_little_is_no_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    codec = pa.Codec("zstd", compression_level=3)
    content = codec.compress(b"x" * (64 << 20), asbytes=True)
    (tmp_path / "samples.jsonl.zst").write_bytes(content)
    monkeypatch.setattr(sample_files, "_MAX_LINE_BYTES", 1 << 20)
    before = pa.total_allocated_bytes()
    with pytest.raises(DataError, match="a line is longer than 1048576 bytes"):
        list(sample_files.read_samples_of(tmp_path))
    assert len(content) < 1 << 14 and pa.total_allocated_bytes() - before < 16 << 20


def test_a_row_of_absurd_depth_or_length_is_quarantined_and_the_others_are_read(tmp_path: Path) -> None:
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

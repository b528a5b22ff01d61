"""Local files as a source: what is read, what is quarantined, what is refused."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from luffy.config.data import FileSource
from luffy.errors import DataError
from tests.synthetic.loaded_source import LoadedSource, load_source


def row(number: int) -> dict[str, object]:
    return {
        "data_source": "math",
        "prompt": [{"role": "user", "content": f"{number}+1"}],
        "target": [{"role": "assistant", "content": f"\\boxed{{{number + 1}}}"}],
        "reward_model": {"style": "rule", "ground_truth": str(number + 1)},
    }


def load(path: Path, **settings: object) -> LoadedSource:
    return load_source(FileSource.model_validate({"kind": "file", "path": str(path), **settings}), "train", 0)


def test_malformed_lines_are_quarantined_with_line_field_and_reason(tmp_path: Path) -> None:
    lines = [
        b"\xef\xbb\xbf" + json.dumps(row(0)).encode(),
        b'{"data_source": "caf\xe9"}',
        b"",
        b"{not json",
        b"[1]",
        json.dumps({**row(1), "reward_model": {}}).encode(),
        json.dumps({**row(1), "data_source": "\ud800"}).encode(),
        json.dumps(row(2)).encode(),
    ]
    (tmp_path / "d.jsonl").write_bytes(b"\n".join(lines))
    loaded = load(tmp_path / "d.jsonl")
    assert [prompt.ground_truth for prompt in loaded.prompts] == ["1", "3"]
    found = [(bad.row, bad.field) for bad in loaded.quarantined]
    assert found == [(2, "(line)"), (4, "(line)"), (5, "(line)"), (6, "reward_model.ground_truth"), (7, "data_source")]
    assert "not UTF-8 text (byte 21: 0xe9)" in loaded.quarantined[0].reason
    assert len(loaded.prompts) + len(loaded.quarantined) == 7


def test_parquet_with_undecodable_text_loses_only_that_row(tmp_path: Path) -> None:
    table = pa.Table.from_pylist([row(0), row(1), row(2)])
    broken = pa.array([b"math", b"\xff\xfe", b"math"], pa.binary()).view(pa.string())
    pq.write_table(table.set_column(0, "data_source", broken), tmp_path / "d.parquet")
    loaded = load(tmp_path / "d.parquet")
    assert [prompt.ground_truth for prompt in loaded.prompts] == ["1", "3"]
    assert [(bad.row, bad.field) for bad in loaded.quarantined] == [(2, "data_source")]


def test_maps_are_read_as_mappings(tmp_path: Path) -> None:
    """Spark and DuckDB write them where others write structs."""
    of_text = pa.map_(pa.string(), pa.string())
    table = pa.Table.from_pylist([row(0), row(1)])
    table = table.append_column("extra_info", pa.array([[("split", "test")], [("a", "b"), ("a", "c")]], of_text))
    messages = [[[("role", "user"), ("content", f"{number}?")]] for number in range(2)]
    table = table.set_column(table.column_names.index("prompt"), "prompt", pa.array(messages, pa.list_(of_text)))
    pq.write_table(table, tmp_path / "d.parquet")
    loaded = load(tmp_path / "d.parquet")
    assert [(prompt.messages[0].content, prompt.extra_info) for prompt in loaded.prompts] == [("0?", {"split": "test"})]
    assert [(bad.row, bad.field) for bad in loaded.quarantined] == [(2, "extra_info")]


@pytest.mark.parametrize("name", ["d.jsonl", "d.parquet"])
@pytest.mark.parametrize(("column", "meant"), [("targte", "target"), ("trace", "traces")])
def test_a_misspelt_demonstration_is_found_in_any_format(tmp_path: Path, name: str, column: str, meant: str) -> None:
    misspelt = row(0)
    misspelt[column] = misspelt.pop("target")
    (tmp_path / "d.jsonl").write_text(json.dumps(misspelt))
    pq.write_table(pa.Table.from_pylist([misspelt]), tmp_path / "d.parquet")
    message = f"none of its 1 rows can be used.* field {column}: is no column; did you mean '{meant}'"
    with pytest.raises(DataError, match=message):
        load(tmp_path / name)


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("missing.jsonl", None, "no such file"),
        ("folder.jsonl", "", "is a directory"),
        ("d.txt", "x", "extension '.txt'; use one of .parquet, .jsonl, .csv"),
        ("none-*.jsonl", None, "no such file"),
        ("d.jsonl", "", "holds no row"),
        ("d.jsonl", "{}\n[]", "none of its 2 rows can be used; the first: row 1, field data_source: is missing"),
        ("d.parquet", "x", "no readable parquet"),
    ],
)
def test_an_unusable_file_is_refused_in_one_line(tmp_path: Path, name: str, content: str | None, reason: str) -> None:
    if name.startswith("folder"):
        (tmp_path / name).mkdir()
    elif content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=reason) as caught:
        load(tmp_path / name)
    assert "\n" not in str(caught.value)
    assert name in str(caught.value)

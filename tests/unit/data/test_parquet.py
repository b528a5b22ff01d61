"""Prepared prompts on disk."""

import tempfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.installed import DATASETS, needs_datasets

from luffy.data.parquet import read_prompts, write_prompts
from luffy.data.schema import SCHEMA
from luffy.errors import DataError
from luffy.types import Message, Prompt, Trace

LUFFY_EVAL = DATASETS / "luffy_eval"

_text = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12).filter(str.strip)
_json = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False, allow_infinity=False) | _text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_text, inner, max_size=3),
    max_leaves=5,
)
_traces = st.builds(
    Trace,
    text=_text,
    author=_text,
    verified=st.sampled_from([None, True, False]),
    logprobs=st.none() | st.lists(st.floats(-1e6, 0.0, allow_nan=False), max_size=4).map(tuple),
)
_prompts = st.builds(
    Prompt,
    uid=_text,
    data_source=_text,
    messages=st.lists(st.builds(Message, st.sampled_from(["user", "assistant"]), _text), max_size=2).map(
        lambda turns: (*turns, Message("user", "?"))
    ),
    ground_truth=_text,
    traces=st.lists(_traces, max_size=3).map(tuple),
    ability=_text,
    extra_info=st.dictionaries(_text, _json, max_size=3),
)


def prompt(uid: str) -> Prompt:
    return Prompt(uid, "math", (Message("user", "1+1"),), "2", (Trace("\\boxed{2}", "me"),))


@settings(deadline=None, max_examples=60)
@given(st.lists(_prompts, max_size=5))
def test_written_prompts_are_read_back(prompts: list[Prompt]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "prompts.parquet"
        assert write_prompts(path, prompts) == len(prompts)
        assert read_prompts(path) == prompts


def test_equal_prompts_make_equal_files(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_prompts(tmp_path / name, (prompt(str(number)) for number in range(100)))
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_other_readers_find_the_columns_of_verl(tmp_path: Path) -> None:
    write_prompts(tmp_path / "p.parquet", [prompt("u")])
    (row,) = pq.read_table(tmp_path / "p.parquet").to_pylist()
    assert row["target"] == [{"role": "assistant", "content": "\\boxed{2}"}]
    assert row["reward_model"] == {"style": "rule", "ground_truth": "2"}


def test_a_broken_write_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "p.parquet"
    write_prompts(path, [prompt("old")])

    def breaking() -> object:
        yield prompt("new")
        raise RuntimeError("interrupted")

    with pytest.raises(RuntimeError):
        write_prompts(path, breaking())  # type: ignore[arg-type]
    assert [found.uid for found in read_prompts(path)] == ["old"]
    assert [found.name for found in tmp_path.iterdir()] == ["p.parquet"]


def test_a_wrong_row_is_named(tmp_path: Path) -> None:
    rows = [{**_row(prompt("u")), "ability": ability} for ability in ("math", "")]
    pq.write_table(pa.Table.from_pylist(rows, SCHEMA), tmp_path / "p.parquet")
    with pytest.raises(DataError, match=r"p\.parquet, row 2, field ability: is empty"):
        read_prompts(tmp_path / "p.parquet")


@needs_datasets
@pytest.mark.parametrize(("name", "rows"), [("valid.all", 6023), ("valid.arc_c", 1172), ("valid.gpqa", 198)])
def test_the_files_of_luffy_are_read(name: str, rows: int) -> None:
    prompts = read_prompts(LUFFY_EVAL / f"{name}.parquet")
    assert len(prompts) == rows
    assert all(set(found.extra_info) == {"index", "split"} and found.messages[0].role == "system" for found in prompts)
    if name == "valid.all":
        assert len({found.uid for found in prompts}) < 1700


def _row(prompt: Prompt) -> dict[str, object]:
    return {
        "uid": prompt.uid,
        "data_source": prompt.data_source,
        "prompt": [{"role": turn.role, "content": turn.content} for turn in prompt.messages],
        "reward_model": {"style": "rule", "ground_truth": prompt.ground_truth},
        "extra_info": "{}",
    }

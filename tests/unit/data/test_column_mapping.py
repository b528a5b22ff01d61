"""From the columns of well-known data sets to prompts."""

import csv
import datetime
import decimal
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import TypeAdapter
from support.installed import DATASETS, needs_datasets
from support.patience import PATIENCE_S

from luffy.config.data import FieldsConfig, FileSource, HubSource, SourceConfig
from luffy.config.load import resolve_recipes
from luffy.config.shipped import recipe_files
from luffy.data.row_filters import grade_traces
from luffy.data.schema import RowError
from luffy.data.sources.column_mapping import prompt_from_fields
from luffy.errors import ConfigError, DataError
from luffy.grading.pool import GraderPool
from luffy.grading.programs import cases_of
from luffy.types import Outcome, Prompt
from tests.synthetic.loaded_source import LoadedSource, load_source

QA = {"data_source": "qa", "problem": "q", "answer": {"column": "a"}, "traces": ({"column": "t", "author": "me"},)}
KEPT = ({"column": "t", "keep_column": "ok"},)


def recipe(name: str, **more: object) -> SourceConfig:
    values: dict = {"data": {"train": {"kind": "recipe", "name": name, **more}}}
    resolve_recipes(values, {}, "test.yaml")
    return TypeAdapter(SourceConfig).validate_json(json.dumps(values["data"]["train"]))


def mapped(row: dict[str, object], **fields: object) -> Prompt:
    return prompt_from_fields(row, FieldsConfig.model_validate({**QA, **fields}), author="someone")


def load(path: Path, **settings: object) -> LoadedSource:
    return load_source(FileSource.model_validate({"kind": "file", "path": str(path), **settings}), "train", 0)


def test_several_traces_with_flags_authors_and_logprobs() -> None:
    row = {"q": "1+1", "a": "2", "t": ["x", "y", "z"], "ok": [True, False, True], "w": "r1", "p": [[-1.0], [], [-2]]}
    trace = {"column": "t", "author_column": "w", "keep_column": "ok", "logprobs_column": "p"}
    found = mapped(row, traces=(trace,)).traces
    assert [(t.text, t.author, t.logprobs) for t in found] == [("x", "r1", (-1.0,)), ("z", "r1", (-2.0,))]


@pytest.mark.parametrize(
    ("flag", "kept"),
    [
        *((flag, 1) for flag in ("true", "True", "TRUE ", True)),
        *((flag, 0) for flag in ("false", "False", None, False)),
    ],
)
def test_a_flag_may_be_written_as_text(flag: object, kept: int) -> None:
    assert len(mapped({"q": "?", "a": "2", "t": "x", "ok": flag}, traces=KEPT).traces) == kept


def test_a_gsm8k_solution_gets_its_answer_into_a_box() -> None:
    row = {"q": "?", "t": "48/2 = <<48/2=24>>24 clips.\n#### 1,072", "a": "x #### y #### 1,072 "}
    prompt = mapped(row, answer={"column": "a", "after": "####"}, traces=({"column": "t", "rewrite": "gsm8k"},))
    assert prompt.ground_truth == "1,072"
    assert prompt.traces[0].text == "48/2 = 24 clips.\nThe answer is \\boxed{1,072}."
    assert prompt.traces[0].author == "someone"


@pytest.mark.parametrize(
    ("row", "answer", "expected"),
    [
        ({"a": "so \\boxed{1} or \\boxed{\\frac{1}{2}}."}, {"boxed": True}, "\\frac{1}{2}"),
        ({"a": "['2', '3']"}, {"element": 0}, "2"),
        ({"a": ["2", "3"]}, {"element": -1}, "3"),
        ({"a": """ ["it's '2' '3'",\n '4']"""}, {"element": 0}, "it's '2' '3'"),
        ({"a": 27.0}, {}, "27"),
        ({"a": {"b": 5}}, {"column": "a.b"}, "5"),
    ],
)
def test_formats_of_answers(row: dict[str, object], answer: dict[str, object], expected: str) -> None:
    assert mapped({"q": "?", **row}, answer={"column": "a", **answer}).ground_truth == expected


@pytest.mark.parametrize(
    ("row", "fields", "column", "reason"),
    [
        ({"q": 3, "a": "2"}, {}, "q", "must be a list of messages"),
        ({"q": " ", "a": "2"}, {}, "q", "is empty"),
        ({"q": "?", "a": None}, {}, "a", "is missing"),
        ({"q": "?", "a": "2", "t": ["x", ""]}, {}, "t[1]", "is empty"),
        ({"q": "?", "a": "2", "t": 5}, {}, "t", "must be text"),
        ({"q": "?", "a": "2"}, {"answer": {"column": "a", "after": "####"}}, "a", "holds no '####'"),
        ({"q": "?", "a": "2"}, {"answer": {"column": "a", "boxed": True}}, "a", "boxed"),
        ({"q": "?", "a": "2"}, {"answer": {"column": "a", "element": 1}}, "a", "with an element 1"),
        ({"q": "?", "a": "['2' '3']"}, {"answer": {"column": "a", "element": 0}}, "a", "must be a list"),
        ({"q": "?", "a": "['2'\n '3']"}, {"answer": {"column": "a", "element": "all"}}, "a", "must be a list"),
        ({"q": "?", "a": float("nan")}, {}, "a", "is missing"),
        ({"q": "?", "a": [float("nan"), 2]}, {"answer": {"column": "a", "element": "all"}}, "a", "is missing"),
        ({"q": "?", "a": "2", "d": datetime.date(2024, 1, 1)}, {"extra": ("d",)}, "d", "cannot be written as JSON"),
        ({"q": "?", "a": "2", "d": [decimal.Decimal(1)]}, {"extra": ("d",)}, "d", "cannot be written as JSON"),
        ({"q": "?", "a": "2", "d": {"e": b"x"}}, {"extra": ("d.e",)}, "d.e", "cannot be written as JSON"),
        ({"q": "?", "a": "2", "t": "x", "ok": "yes"}, {"traces": KEPT}, "ok", "must be true or false, found 'yes'"),
        ({"q": "?", "a": "2", "t": ["x"], "ok": [1]}, {"traces": KEPT}, "ok", "must be true or false, found '1'"),
    ],
)
def test_the_wrong_column_is_named(row: dict, fields: dict, column: str, reason: str) -> None:
    with pytest.raises(RowError, match=reason) as caught:
        mapped(row, **fields)
    assert caught.value.field == column


def test_csv_parquet_and_jsonl_give_the_same_prompts(tmp_path: Path) -> None:
    rows = [{"q": f'{n} "and",\nmore', "a": str(n), "t": f"\\boxed{{{n}}}"} for n in range(3)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "d.parquet")
    (tmp_path / "d.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with (tmp_path / "d.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ["q", "a", "t"])
        writer.writeheader()
        writer.writerows(rows)
    one, two, three = (load(tmp_path / f"d.{end}", fields=QA).prompts for end in ("csv", "jsonl", "parquet"))
    assert one == two == three and len(one) == 3


def test_a_pattern_reads_its_files_in_the_order_of_their_names(tmp_path: Path) -> None:
    for name in ("b", "a"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"q": name, "a": "1"}))
    assert [p.messages[0].content for p in load(tmp_path / "*.jsonl", fields=QA).prompts] == ["a", "b"]


def test_a_missing_column_is_refused_with_a_list_of_the_present_ones(tmp_path: Path) -> None:
    (tmp_path / "d.csv").write_text("question,a,t\n1,2,3\n")
    pq.write_table(pa.table({"question": ["1"], "a": ["2"]}), tmp_path / "d.parquet")
    for name, missing in (("d.csv", "q missing"), ("d.parquet", "q, t missing")):
        with pytest.raises(DataError, match=f"{name}: column {missing}; found question, a"):
            load(tmp_path / name, fields=QA)


def test_a_damaged_parquet_names_the_last_readable_row(tmp_path: Path) -> None:
    table = pa.table({"q": [str(n) * 50 for n in range(2000)], "a": ["2"] * 2000, "t": ["3"] * 2000})
    pq.write_table(table, tmp_path / "d.parquet", row_group_size=1000, compression="zstd", use_dictionary=False)
    column = pq.read_metadata(tmp_path / "d.parquet").row_group(1).column(0)
    content = bytearray((tmp_path / "d.parquet").read_bytes())
    start, size = column.data_page_offset, column.total_compressed_size
    content[start : start + size] = bytes(size)
    (tmp_path / "d.parquet").write_bytes(content)
    with pytest.raises(DataError, match=r"d\.parquet: cannot be read after row \d+"):
        load(tmp_path / "d.parquet", fields=QA)


@pytest.mark.parametrize("name", recipe_files())
def test_every_shipped_recipe_is_a_valid_source(name: str) -> None:
    assert recipe(name).kind == "hub"
    assert recipe(name, file="copy.jsonl", max_rows=5).model_dump()["path"] == "copy.jsonl"


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ({"name": "gsm9k"}, r"no recipe 'gsm9k'; did you mean gsm8k.*\? there are"),
        ({"name": "aime42"}, r"no recipe 'aime42'; did you mean aime2[45] or .*\? there are"),
        ({"name": "zzz"}, "no recipe 'zzz'; there are"),
        ({}, "needs exactly one of name"),
        ({"name": "gsm8k", "fiel": "x"}, "unknown key 'fiel'"),
    ],
)
def test_a_wrong_recipe_is_refused(asked: dict, reason: str) -> None:
    with pytest.raises(ConfigError, match=f"test.yaml: data.train.*{reason}"):
        resolve_recipes({"data": {"train": {"kind": "recipe", **asked}}}, {}, "test.yaml")


@needs_datasets
def test_a_null_answer_is_quarantined_by_row_and_column() -> None:
    fields = {"data_source": "math", "problem": "problem", "answer": {"column": "answer"}}
    loaded = load(DATASETS / "math_train7474" / "train.jsonl", fields=fields)
    assert len(loaded.prompts) == 7470
    reasons = [(row.field, row.reason) for row in loaded.quarantined]
    assert sorted(reasons) == [("answer", "is empty")] * 2 + [("answer", "is missing")] * 2


def test_a_distilled_row_of_gsm8k_whose_reference_lost_its_thousands_is_left_out(tmp_path: Path) -> None:
    right = {"problem": "6 x 7?", "groud_truth_solution": "So \\boxed{42}", "boxed_answer_success": True}
    wrong = {"problem": "2 x 500?", "groud_truth_solution": "So \\boxed{1},000", "boxed_answer_success": False}
    rows = [{**row, "reasoning_solution": "Hm.\n</think>\nIt is \\boxed{42}."} for row in (right, wrong)]
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    (prompt,) = load_source(recipe("gsm8k_r1", file=str(file)), "train", 0).prompts
    assert (prompt.ground_truth, prompt.traces[0].author) == ("42", "DeepSeek-R1")
    assert prompt.traces[0].text.startswith("<think>")


@needs_datasets
def test_human_solutions_of_gsm8k_are_graded_correct() -> None:
    prompts = load_source(recipe("gsm8k", file=str(DATASETS / "gsm8k/train.jsonl"), max_rows=300), "train", 0).prompts
    with GraderPool(1, PATIENCE_S) as grader:
        assert {outcome for row in grade_traces(prompts, grader) for outcome in row} == {Outcome.CORRECT}


def test_problems_of_apps_are_graded_by_their_test_cases() -> None:
    fields = recipe("apps").fields
    assert fields is not None
    row = {"question": "Add.", "input_output": '{"inputs": ["1 2"], "outputs": ["3"]}', "difficulty": "interview"}
    prompt = prompt_from_fields(row, fields, author="")
    assert (prompt.grader, prompt.data_source, cases_of(prompt.ground_truth)[0].given) == ("code", "apps", "1 2")
    assert isinstance(recipe("eurus_2_code"), HubSource)

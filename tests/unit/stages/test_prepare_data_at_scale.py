"""Shards, splits, resumption and the formats that leave the house."""

import itertools
import json
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.installed import DATASETS, needs_datasets
from support.patience import wait_until
from synthetic.preparation import prepare, sources_of

import luffy.data.parquet as parquet
from luffy.data import shards
from luffy.data.parquet import read_prompts
from luffy.data.schema import problem_key
from luffy.data.shards import filter_shard
from luffy.data.splits import LUFFY_SCHEMA
from luffy.errors import DataError, LostError
from luffy.stages.program import StageResult

SYSTEM = "Put your thoughts between <think> and </think>."


def luffy_row(number: int, *, answer: int | None = None) -> dict[str, object]:
    """As in the original project's training file: its columns, its order inside the structs."""
    reply = f"<think>\n{number} + 1 = {number + 1}\n</think>\n\\boxed{{{number + 1 if answer is None else answer}}}"
    return {
        "data_source": "",
        "prompt": [{"content": SYSTEM, "role": "system"}, {"content": f"{number} + 1 = ?", "role": "user"}],
        "target": [{"content": reply, "role": "assistant"}],
        "ability": "math",
        "reward_model": {"ground_truth": str(number + 1), "style": "rule"},
        "extra_info": {"index": number, "split": "default"},
    }


def write(path: Path, rows: list[dict[str, object]]) -> dict[str, object]:
    pq.write_table(pa.Table.from_pylist(rows, LUFFY_SCHEMA), path)
    return {"kind": "file", "path": str(path), "author": "r1"}


class _Deadly:
    """Kills the process that unpickles it."""

    def __reduce__(self):
        return eval, ("__import__('os').kill(__import__('os').getpid(), 9)",)


@pytest.mark.usefixtures("small_shards")
def test_a_worker_that_is_killed_is_a_lost_process(tmp_path, monkeypatch):
    source = write(tmp_path / "d.parquet", [luffy_row(n) for n in range(45)])
    monkeypatch.setattr(shards.FilterJob, "__reduce__", _Deadly.__reduce__)
    with pytest.raises(LostError, match=r"lower execution\.data_workers"):
        prepare(tmp_path / "out", 2, train=source)


def contents(out: Path, result: StageResult) -> dict[str, bytes]:
    return {name: (out / name).read_bytes() for name in result.outputs if (out / name).is_file()}


@pytest.fixture
def small_shards(monkeypatch) -> None:
    monkeypatch.setattr(parquet, "ROWS_AT_ONCE", 10)


@pytest.mark.slow
@pytest.mark.usefixtures("small_shards")
def test_rows_do_not_depend_on_the_number_of_processes(tmp_path):
    """Not even where those of one problem, in several shards, are merged."""
    rows = [luffy_row(n % 50, answer=1 if n % 7 == 0 else None) for n in range(60)]
    for number, row in enumerate(rows):
        row["target"][0]["content"] = row["target"][0]["content"].replace("<think>\n", f"<think>\nway {number}: ")  # type: ignore[index]
    asked = {
        "train": write(tmp_path / "d.parquet", rows),
        "validation_prompts": 5,
        "filters": {"near_duplicates": 0.9},
        "sft": {"unique_train_examples": 4},
    }
    one, three = prepare(tmp_path / "one", **asked), prepare(tmp_path / "three", 3, **asked)
    assert one.outputs == three.outputs
    assert contents(tmp_path / "one", one) == contents(tmp_path / "three", three)
    assert sources_of(tmp_path / "one")["train"]["folded"] > 0


def interrupt_at_the_fourth_shard(monkeypatch, out: Path, **asked) -> list[tuple[str, int]]:
    """Returns the shards that this attempt and later ones begin."""
    work, begun = filter_shard, []

    def interrupted(self, index, rows, folder, grader):
        begun.append((folder.name, index))
        if len(begun) == 4:
            raise KeyboardInterrupt
        work(self, index, rows, folder, grader)

    monkeypatch.setattr("luffy.data.shards.filter_shard", interrupted)
    with pytest.raises(KeyboardInterrupt):
        prepare(out, **asked)
    return begun


@pytest.mark.usefixtures("small_shards")
def test_what_was_interrupted_continues_behind_its_last_shard(tmp_path, monkeypatch):
    source = write(tmp_path / "d.parquet", [luffy_row(n) for n in range(45)])
    undisturbed = contents(tmp_path / "a", prepare(tmp_path / "a", train=source))
    begun = interrupt_at_the_fourth_shard(monkeypatch, tmp_path / "b", train=source)
    result = prepare(tmp_path / "b", train=source)
    assert begun == [("train", n) for n in (0, 1, 2, 3, 3, 4)] + [("suites.small", 0)]
    assert contents(tmp_path / "b", result) == undisturbed
    assert result.scratch == ("shards",)


@pytest.mark.slow
def test_a_killed_program_continues_and_leaves_no_process(tmp_path, monkeypatch):
    source = write(tmp_path / "d.parquet", [luffy_row(n) for n in range(4_000)])
    script = tmp_path / "prepare.py"
    script.write_text(
        "import sys; sys.path[:0] = sys.argv[2:]\n"
        "from pathlib import Path\n"
        "from luffy.data import parquet\n"
        "from synthetic.preparation import prepare\n"
        "parquet.ROWS_AT_ONCE = 500\n"
        "if __name__ == '__main__':\n"
        f"    prepare(Path(sys.argv[1]), 2, train={source})\n"
    )
    root = Path(__file__).parents[3]
    command = [sys.executable, script, tmp_path / "out", root, root / "tests"]
    killed = subprocess.Popen(command)
    shards = tmp_path / "out" / "shards" / "train"
    wait_until(lambda: list(shards.glob("*.json")))
    children = [child.pid for child in psutil.Process(killed.pid).children(recursive=True)]
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    finished = {path.name: path.stat().st_mtime_ns for path in shards.glob("*.json")}
    assert finished and children
    wait_until(lambda: not [pid for pid in children if Path(f"/proc/{pid}").exists()])
    monkeypatch.setattr(parquet, "ROWS_AT_ONCE", 500)
    prepare(tmp_path / "out", 2, train=source)
    assert len(list(shards.glob("*.json"))) == 8
    assert {name: (shards / name).stat().st_mtime_ns for name in finished} == finished
    assert pq.read_metadata(tmp_path / "out" / "train.parquet").num_rows == 4_000


def test_a_luffy_file_comes_back_with_the_same_columns_and_nesting(tmp_path):
    rows = [luffy_row(n) for n in range(20)]
    source = write(tmp_path / "d.parquet", rows)
    prepare(tmp_path / "out", train=source, luffy_parquet=True)
    written = pq.read_table(tmp_path / "out" / "train.luffy.parquet")
    assert written.schema.remove_metadata() == pq.read_schema(tmp_path / "d.parquet").remove_metadata()
    assert written.to_pylist() == rows
    again = {**source, "path": str(tmp_path / "out" / "train.luffy.parquet")}
    prepare(tmp_path / "again", train=again)
    one, other = (read_prompts(tmp_path / name / "train.parquet") for name in ("out", "again"))
    assert one == other


@needs_datasets
def test_the_published_evaluation_file_comes_back_row_by_row(tmp_path):
    path = DATASETS / "luffy_eval" / "valid.all.parquet"
    train = {"kind": "file", "path": str(path), "max_rows": 700}
    prepare(tmp_path, train=train, luffy_parquet=True, max_prompt_tokens=5000)
    original = {}
    for row in pq.read_table(path).slice(0, 700).to_pylist():
        row.pop("__index_level_0__")
        original.setdefault(row["prompt"][-1]["content"].strip().casefold(), row)
    written = pq.read_table(tmp_path / "train.luffy.parquet")
    for name in ("prompt", "reward_model", "extra_info"):
        assert written.schema.field(name).type == pq.read_schema(path).field(name).type
    for row in written.to_pylist():
        assert {**row, "target": []} == {**original[row["prompt"][-1]["content"].strip().casefold()], "target": []}
    assert len(written) > 400


def test_the_splits_share_the_prompts_out(tmp_path):
    rows = [luffy_row(n, answer=0 if n % 10 == 9 else None) for n in range(40)]
    view = {"unique_train_examples": 12}
    prepare(tmp_path, train=write(tmp_path / "d.parquet", rows), sft=view, validation_prompts=6)
    names = ("train", "sft", "rl_complement", "validation")
    train, sft, complement, validation = ({p.uid for p in read_prompts(tmp_path / f"{name}.parquet")} for name in names)
    assert (len(train), len(sft), len(complement), len(validation)) == (30, 12, 22, 6)
    assert sft <= train and not validation & (train | complement) and not sft & complement
    assert len(sft | complement) == 34  # with the four whose trace is wrong
    assert not any(prompt.traces for prompt in read_prompts(tmp_path / "rl_complement.parquet"))


def test_sft_sees_correct_traces_alone_where_rl_keeps_all(tmp_path):
    rows = [luffy_row(n, answer=0 if n % 2 else None) for n in range(1, 11)]
    prepare(tmp_path, train=write(tmp_path / "d.parquet", rows), require_verified_traces=False)
    assert len(read_prompts(tmp_path / "train.parquet")) == 10
    assert [p.traces[0].verified for p in read_prompts(tmp_path / "sft.parquet")] == [True] * 5


def test_easy_and_hard_are_the_two_sides_of_the_median(tmp_path):
    rows = [luffy_row(10**n) for n in range(9)]
    found = {}
    for side in ("easy", "hard"):
        source = write(tmp_path / "d.parquet", rows)
        prepare(tmp_path / side, train=source, filters={"difficulty": side})
        found[side] = {p.uid for p in read_prompts(tmp_path / side / "train.parquet")}
    assert len(found["easy"] | found["hard"]) == 9 and not found["easy"] & found["hard"]
    assert abs(len(found["easy"]) - len(found["hard"])) <= 2


def test_the_card_names_what_was_and_was_not_checked(tmp_path):
    contaminated = {**luffy_row(1), "prompt": [{"role": "user", "content": "secret problem"}]}
    bench = tmp_path / "bench.jsonl"
    bench.write_text(json.dumps({"q": "Secret  problem", "a": "2"}))
    fields = {"data_source": "b", "problem": "q", "answer": {"column": "a"}}
    result = prepare(
        tmp_path / "out",
        train=write(tmp_path / "d.parquet", [luffy_row(5), contaminated]),
        decontamination={"benchmarks": {"math500": {"kind": "file", "path": str(bench), "fields": fields}}},
    )
    card = json.loads((tmp_path / "out" / "card.json").read_text())
    assert card["benchmarks"]["checked"] == {"small": 4, "math500": 1}
    assert "aime24" in card["benchmarks"]["not_checked"] and "math500" not in card["benchmarks"]["not_checked"]
    (hit,) = card["sources"]["train"]["hits"]
    assert (hit["where"], hit["benchmark"], hit["row"]) == ("prompt", "math500", 1)
    assert "secret" not in (tmp_path / "out" / "quarantine.jsonl").read_text()
    assert card["sources"]["train"]["prompt_histogram"]
    for name in result.outputs:
        if name.endswith(".parquet"):
            assert set(card["outputs"][name]) == {"rows", "bytes", "sha256"}
    assert "not checked: aime24" in (tmp_path / "out" / "card.md").read_text()


def test_near_duplicates_and_equal_problems_are_counted_apart(tmp_path):
    long = " ".join(f"w{n}" for n in range(60))
    texts = [long, long.upper(), long + " end", "another"]
    rows = [{**luffy_row(1), "prompt": [{"role": "user", "content": text}]} for text in texts]
    prepare(tmp_path, train=write(tmp_path / "d.parquet", rows), filters={"near_duplicates": 0.8})
    card = sources_of(tmp_path)["train"]
    assert card["rejected"] == {"duplicate_problem": 1, "near_duplicate": 1}
    assert card["rows_out"] == 2


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"sft": {"unique_train_examples": 99}}, "data.sft.unique_train_examples: 99 asked for, 5 training prompts"),
        ({"validation_prompts": 5}, "data.validation_prompts: 5 of the 5 training prompts would leave none"),
    ],
)
def test_what_cannot_be_cut_out_is_refused(tmp_path, changes, reason):
    source = write(tmp_path / "d.parquet", [luffy_row(n) for n in range(5)])
    with pytest.raises(DataError, match=reason):
        prepare(tmp_path / "out", train=source, **changes)


@pytest.mark.parametrize(("view", "in_sft"), [("all", 5), (3, 3)])
def test_a_prompt_without_a_correct_trace_is_not_lost_between_sft_and_the_complement(tmp_path, view, in_sft):
    rows = [luffy_row(n, answer=0 if n % 2 else None) for n in range(1, 11)]
    common = {"train": write(tmp_path / "d.parquet", rows), "require_verified_traces": False}
    prepare(tmp_path, sft={"unique_train_examples": view}, **common)
    sft, complement = (read_prompts(tmp_path / f"{name}.parquet") for name in ("sft", "rl_complement"))
    assert (len(sft), len({prompt.uid for prompt in [*sft, *complement]})) == (in_sft, 10)
    assert all(trace.verified for prompt in sft for trace in prompt.traces)
    with pytest.raises(DataError, match="6 asked for, 5 training prompts have a correct trace"):
        prepare(tmp_path / "more", sft={"unique_train_examples": 6}, **common)


def test_a_correct_trace_that_comes_by_merging_counts(tmp_path):
    rows = [luffy_row(1, answer=0), luffy_row(1), luffy_row(2, answer=0)]
    prepare(tmp_path, train=write(tmp_path / "d.parquet", rows), require_verified_traces=False)
    (one,) = read_prompts(tmp_path / "sft.parquet")
    assert (one.messages[-1].content, len(one.traces)) == ("1 + 1 = ?", 1)
    assert [p.messages[-1].content for p in read_prompts(tmp_path / "rl_complement.parquet")] == ["2 + 1 = ?"]


def test_no_problem_of_another_split_comes_back_by_a_row_that_lost_its_trace(tmp_path):
    rows = [luffy_row(n) for n in range(10)]
    again = [luffy_row(n, answer=0) for n in [*range(10), 77, 77]]
    for row, spaces in zip(again, itertools.cycle([" ", "  "])):
        row["prompt"][1]["content"] = row["prompt"][1]["content"].replace("=", f"{spaces}=")  # type: ignore[index]
    view = {"unique_train_examples": 4}
    prepare(tmp_path, train=write(tmp_path / "d.parquet", rows + again), sft=view, validation_prompts=3)
    names = ("sft", "rl_complement", "validation")
    problems = [[problem_key(p.messages) for p in read_prompts(tmp_path / f"{name}.parquet")] for name in names]
    assert [len(found) for found in problems] == [4, 4, 3]  # three of train, and 77 + 1
    assert len({problem for found in problems for problem in found}) == 11


CHANGING = """
from luffy.data.schema import prompt_uid
from luffy.types import Message, Prompt, Trace

class Riddles:
    kind, is_light = "riddles", False
    def __init__(self, first, count): self.first, self.count = first, count
    def inputs(self): return {"riddles": f"{self.first}:{self.count}"}
    def rows(self):
        for n in range(self.first, self.first + self.count):
            messages = (Message("user", f"riddle {n}"),)
            yield Prompt(prompt_uid("r", messages), "r", messages, str(n), (Trace(f"\\\\boxed{{{n}}}", "me"),))

def riddles(purpose, seed, options): return Riddles(*(int(n) for n in open(options["file"]).read().split()))
"""


@pytest.mark.usefixtures("small_shards")
@pytest.mark.parametrize("which", ["train", "benchmark"])
def test_what_was_interrupted_starts_over_when_its_inputs_have_changed(tmp_path, monkeypatch, which):
    (tmp_path / "my_changing.py").write_text(CHANGING)
    monkeypatch.syspath_prepend(tmp_path)
    sizes = {"train": tmp_path / "train.txt", "benchmark": tmp_path / "benchmark.txt"}
    sources = {
        name: {"kind": "custom", "factory": "my_changing:riddles", "options": {"file": str(path)}}
        for name, path in sizes.items()
    }
    sizes["train"].write_text("0 45")
    sizes["benchmark"].write_text("1000 1")
    asked = {"train": sources["train"], "decontamination": {"benchmarks": {"other": sources["benchmark"]}}}
    interrupt_at_the_fourth_shard(monkeypatch, tmp_path / "out", **asked)
    sizes[which].write_text("100 12" if which == "train" else "3 4")
    prepare(tmp_path / "out", **asked)
    found = {prompt.ground_truth for prompt in read_prompts(tmp_path / "out" / "train.parquet")}
    expected = range(100, 112) if which == "train" else [*range(3), *range(7, 45)]
    assert found == {str(n) for n in expected}

"""Shards, processes, and what an interrupted preparation continues."""

import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pyarrow.parquet as pq
import pytest
from support.patience import wait_until
from synthetic.preparation import prepare, row, sources_of, written

import luffy.data.parquet as parquet
from luffy.data import shards
from luffy.data.parquet import read_prompts
from luffy.data.shards import filter_shard
from luffy.errors import LostError
from luffy.stages.program import StageResult


def rows_of(count: int, problems: int) -> list[dict[str, object]]:
    """Rows of so many problems; every seventh has a wrong trace."""
    return [
        row(f"{n % problems} + 1 = ?", f"<think>way {n}</think> \\boxed{{{1 if n % 7 == 6 else n % problems + 1}}}",
            str(n % problems + 1)) for n in range(count)
    ]  # fmt: skip


def contents(out: Path, result: StageResult) -> dict[str, bytes]:
    return {name: (out / name).read_bytes() for name in result.outputs if (out / name).is_file()}


@pytest.fixture
def small_shards(monkeypatch) -> None:
    monkeypatch.setattr(parquet, "ROWS_AT_ONCE", 10)


class _Deadly:
    """Kills the process that unpickles it."""

    def __reduce__(self):
        return eval, ("__import__('os').kill(__import__('os').getpid(), 9)",)


@pytest.mark.usefixtures("small_shards")
def test_a_worker_that_is_killed_is_a_lost_process(tmp_path, monkeypatch):
    monkeypatch.setattr(shards.FilterJob, "__reduce__", _Deadly.__reduce__)
    with pytest.raises(LostError, match=r"lower execution\.data_workers"):
        prepare(tmp_path / "out", 2, train=written(tmp_path / "d.jsonl", rows_of(45, 45)))


@pytest.mark.slow
@pytest.mark.usefixtures("small_shards")
def test_rows_do_not_depend_on_the_number_of_processes(tmp_path):
    """Not even where those of one problem, in several shards, are merged."""
    asked = {
        "train": written(tmp_path / "d.jsonl", rows_of(60, 50)),
        "validation_prompts": 5,
        "filters": {"near_duplicates": 0.9},
        "sft": {"unique_train_examples": 4},
    }
    one, three = prepare(tmp_path / "one", **asked), prepare(tmp_path / "three", 3, **asked)
    assert one.outputs == three.outputs
    assert contents(tmp_path / "one", one) == contents(tmp_path / "three", three)
    assert sources_of(tmp_path / "one")["train"]["folded"] > 0


def interrupt(patch: pytest.MonkeyPatch, at: tuple[str, int], out: Path, **asked: object) -> list[tuple[str, int]]:
    """Interrupt the stage at a shard; returns those that this attempt and later ones begin."""
    begun = list[tuple[str, int]]()

    def interrupted(self, index, rows, folder, grader):
        begun.append((folder.name, index))
        if begun[-1] == at and begun.count(at) == 1:
            raise KeyboardInterrupt
        filter_shard(self, index, rows, folder, grader)

    patch.setattr("luffy.data.shards.filter_shard", interrupted)
    with pytest.raises(KeyboardInterrupt):
        prepare(out, **asked)
    return begun


@pytest.mark.usefixtures("small_shards")
@pytest.mark.parametrize(
    ("at", "problems", "later"),
    [
        (("train", 3), 45, [("train", 3), ("train", 4), ("suites.small", 0)]),
        # When those of one problem have been merged.
        (("suites.small", 0), 15, [("suites.small", 0)]),
    ],
)
def test_what_was_interrupted_continues_behind_its_last_shard(tmp_path, monkeypatch, at, problems, later):
    source, out = written(tmp_path / "d.jsonl", rows_of(45, problems)), tmp_path / "out"
    undisturbed = contents(tmp_path / "whole", prepare(tmp_path / "whole", train=source))
    begun = interrupt(monkeypatch, at, out, train=source)
    before = len(begun)
    result = prepare(out, train=source)
    assert begun[before:] == later
    assert contents(out, result) == undisturbed
    assert result.scratch == ("shards",)


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
@pytest.mark.parametrize(
    ("which", "now", "left"), [("train", "100 12", range(100, 112)), ("benchmark", "3 4", [*range(3), *range(7, 45)])]
)
def test_what_was_interrupted_starts_over_when_its_inputs_have_changed(tmp_path, monkeypatch, which, now, left):
    (tmp_path / "my_changing.py").write_text(CHANGING)
    monkeypatch.syspath_prepend(tmp_path)
    sources = {}
    for name, numbers in {"train": "0 45", "benchmark": "1000 1"}.items():
        (tmp_path / name).write_text(numbers)
        options = {"file": str(tmp_path / name)}
        sources[name] = {"kind": "custom", "factory": "my_changing:riddles", "options": options}
    asked = {"train": sources["train"], "decontamination": {"benchmarks": {"other": sources["benchmark"]}}}
    interrupt(monkeypatch, ("train", 3), tmp_path / "out", **asked)
    (tmp_path / which).write_text(now)
    prepare(tmp_path / "out", **asked)
    found = {prompt.ground_truth for prompt in read_prompts(tmp_path / "out" / "train.parquet")}
    assert found == {str(n) for n in left}


@pytest.mark.slow
def test_a_killed_program_continues_and_leaves_no_process(tmp_path, monkeypatch):
    source = written(
        tmp_path / "d.jsonl", [row(f"{n} + 1 = ?", f"\\boxed{{{n + 1}}}", str(n + 1)) for n in range(4000)]
    )
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
    killed = subprocess.Popen([sys.executable, script, tmp_path / "out", root, root / "tests"])
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

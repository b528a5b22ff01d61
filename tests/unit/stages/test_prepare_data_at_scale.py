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


@pytest.mark.usefixtures("small_shards")
def test_a_worker_that_is_killed_is_a_lost_process(tmp_path, monkeypatch):
    deadly = eval, ("__import__('os').kill(__import__('os').getpid(), 9)",)  # in the process that unpickles it
    monkeypatch.setattr(shards.FilterJob, "__reduce__", lambda job: deadly)
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


@pytest.mark.usefixtures("small_shards")
@pytest.mark.parametrize(
    ("which", "now", "left"),
    [("train", range(100, 112), range(100, 112)), ("benchmark", range(3, 7), [*range(3), *range(7, 45)])],
)
def test_what_was_interrupted_starts_over_when_its_inputs_have_changed(tmp_path, monkeypatch, which, now, left):
    def riddles(name: str, numbers: range) -> dict[str, object]:
        rows = [row(f"riddle {n}", f"\\boxed{{{n}}}", str(n)) for n in numbers]
        return written(tmp_path / f"{name}.jsonl", rows)

    benchmarks = {"other": riddles("benchmark", range(1000, 1001))}
    asked = {"train": riddles("train", range(45)), "decontamination": {"benchmarks": benchmarks}}
    interrupt(monkeypatch, ("train", 3), tmp_path / "out", **asked)
    riddles(which, now)
    prepare(tmp_path / "out", **asked)
    found = {prompt.ground_truth for prompt in read_prompts(tmp_path / "out" / "train.parquet")}
    assert found == {str(n) for n in left}


PREPARED = """
import sys; sys.path[:0] = sys.argv[2:]
from pathlib import Path
from luffy.data import parquet
from synthetic.preparation import prepare
parquet.ROWS_AT_ONCE = 500
if __name__ == "__main__":
    prepare(Path(sys.argv[1]), 2, train={source})
"""


@pytest.mark.slow
def test_a_killed_program_continues_and_leaves_no_process(tmp_path, monkeypatch):
    rows = [row(f"{n} + 1 = ?", f"\\boxed{{{n + 1}}}", str(n + 1)) for n in range(4000)]
    source, script, out = written(tmp_path / "d.jsonl", rows), tmp_path / "prepare.py", tmp_path / "out"
    script.write_text(PREPARED.format(source=source))
    root = Path(__file__).parents[3]
    killed = subprocess.Popen([sys.executable, script, out, root, root / "tests"])
    wait_until(lambda: list((out / "shards" / "train").glob("*.json")))
    children = [child.pid for child in psutil.Process(killed.pid).children(recursive=True)]
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    finished = {path: path.stat().st_mtime_ns for path in (out / "shards" / "train").glob("*.json")}
    assert finished and children
    wait_until(lambda: not [pid for pid in children if Path(f"/proc/{pid}").exists()])
    monkeypatch.setattr(parquet, "ROWS_AT_ONCE", 500)
    prepare(out, 2, train=source)
    assert len(list((out / "shards" / "train").glob("*.json"))) == 8
    assert {path: path.stat().st_mtime_ns for path in finished} == finished
    assert pq.read_metadata(out / "train.parquet").num_rows == 4_000

"""Rows a second and peak memory of `prepare_data`, over the number of rows: time linear, memory flat.

Run: python tests/benchmarks/data_preparation.py [ROWSxTOKENS[xTIMES] ...]

Large sizes: 10000x8000 100000x500. With TIMES every problem stands there so often, far apart, each time with another
trace, and the rows are merged: 10000x8000x2.

Each size runs the stage in a process of its own on a parquet file made for it: problems of 60 words with one reasoning
trace of about 8,000 (or 500) tokens each, MinHash, decontamination and grading on. The memory of a size is the highest
sum over the stage and all its processes (graders included) of the memory that each has for itself (USS), looked at four
times a second. The single row shows what starting costs.
"""

import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
from rich.console import Console

SIZES = ("1x8000", "250x8000", "1000x8000", "2500x500", "10000x500")
WORKERS = 2
_WORDS = [
    f"{a}{b}{c}" for a in ("ba", "co", "di", "fe") for b in ("lo", "ma", "ni", "ru", "sa") for c in ("t", "n", "x")
]


def make_row(number: int, num_tokens: int, way: int = 0) -> dict[str, object]:
    """A problem with a number of its own and a trace of `num_tokens` tokens or a little less, one of several ways."""
    rng = random.Random(number)
    problem = " ".join(rng.choices(_WORDS, k=60)) + f" {number}?"
    rng.seed(f"{number} {way}")
    reasoning = " ".join(rng.choices(_WORDS, k=num_tokens // 3))
    return {
        "data_source": "made",
        "prompt": [{"role": "user", "content": problem}],
        "target": [{"role": "assistant", "content": f"<think>\n{reasoning}\n</think>\n\\boxed{{{number}}}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(number)},
    }


def make_file(path: Path, num_rows: int, num_tokens: int, times: int) -> None:
    """One row group, as published files have them: reading must not need it whole."""
    schema = pa.Table.from_pylist([make_row(0, 10)]).schema
    with pq.ParquetWriter(path, schema, compression="zstd") as writer:
        batch: list[dict[str, object]] = []
        for number in range(num_rows):
            batch.append(make_row(number % (num_rows // times), num_tokens, number // (num_rows // times)))
            if len(batch) == 5000 or number == num_rows - 1:
                writer.write_table(pa.Table.from_pylist(batch, schema))
                batch = []


def prepare(path: Path, out: Path) -> None:
    """Run the stage on the file (in the process that measures nothing)."""
    from luffy.config.data import DataConfig
    from luffy.config.execution import ExecutionConfig, TrackingConfig
    from luffy.config.grading import GradingConfig
    from luffy.config.settings import PrepareDataSettings
    from luffy.data.tokenizer import build_tokenizer
    from luffy.pipeline.machine.events import EventWriter
    from luffy.stages.prepare_data import run
    from luffy.stages.program import StageContext

    build_tokenizer([" ".join(_WORDS)] * 20).save_pretrained(out / "model")
    data = {
        "train": {"kind": "file", "path": str(path)},
        "suites": {"small": {"kind": "arithmetic", "num_prompts": 100, "num_operations": [8]}},
        "max_prompt_tokens": 1024,
        "max_trace_tokens": 20_000,
        "filters": {"near_duplicates": 0.9},
    }
    settings = PrepareDataSettings(
        seed=0,
        data=DataConfig.model_validate_json(json.dumps(data)),
        grading=GradingConfig(),
        model_path=str(out / "model"),
        chat_template=None,
    )
    execution = ExecutionConfig(data_workers=WORKERS, grader_workers=1)
    events = EventWriter(out / "events.jsonl")
    run(settings, StageContext(out, {}, "key", "prepare_data", execution, TrackingConfig(), events))


def memory_mb(process: psutil.Process) -> tuple[float, int]:
    """Unique memory of a process and its descendants, and how many processes they are."""
    total, count = 0.0, 0
    for one in [process, *process.children(recursive=True)]:
        try:
            total += one.memory_full_info().uss / 2**20
            count += 1
        except psutil.Error:
            continue  # it ended in between
    return total, count


def measure(num_rows: int, num_tokens: int, times: int, folder: Path) -> tuple[float, float, float, int]:
    """Seconds, CPU seconds of all processes, peak memory in MiB, processes at the peak."""
    name = f"{num_rows}x{num_tokens}x{times}"
    path, out = folder / f"{name}.parquet", folder / f"out-{name}"
    make_file(path, num_rows, num_tokens, times)
    out.mkdir()
    began, used = time.perf_counter(), cpu_seconds()
    child = subprocess.Popen([sys.executable, __file__, "--prepare", str(path), str(out)])
    peak = (0.0, 0)
    while child.poll() is None:
        try:
            peak = max(peak, memory_mb(psutil.Process(child.pid)))
        except psutil.NoSuchProcess:
            break
        time.sleep(0.25)
    seconds = time.perf_counter() - began
    if child.wait():
        sys.exit(f"the stage failed on {path}")
    return seconds, cpu_seconds() - used, peak[0], peak[1]


def cpu_seconds() -> float:
    """Of all processes that were started here and have ended, theirs included."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def main() -> None:
    """Print one line a size."""
    if sys.argv[1:2] == ["--prepare"]:
        prepare(Path(sys.argv[2]), Path(sys.argv[3]))
        return
    console = Console()
    console.print("rows x tokens, seconds, rows/s, CPU seconds of all processes, peak MiB, processes at the peak")
    with tempfile.TemporaryDirectory() as folder:
        for size in sys.argv[1:] or SIZES:
            num_rows, num_tokens, times = map(int, [*size.split("x"), "1"][:3])
            seconds, cpu, memory, processes = measure(num_rows, num_tokens, times, Path(folder))
            speed = num_rows / seconds
            console.print(f"{size:>12} {seconds:8.1f} {speed:8.0f} {cpu:8.1f} {memory:8.0f} {processes:4d}")


if __name__ == "__main__":
    main()

"""Time and peak memory of `prepare_data`, where rows of one problem are merged.

Run: python tests/benchmarks/preparation.py [ROWS] [WAYS] [WORKERS]          (tiny: 20000)

Each problem stands in WAYS rows, each with another trace of some 300 characters. Before the stage the process holds
what it imports and no row; the second peak is that of the largest worker.
"""

import resource
import tempfile
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from measuring import numbers, show
from synthetic.preparation import prepare, sources_of

_AT_ONCE = 20_000


def write(path: Path, num_rows: int, ways: int) -> None:
    """Rows in the order in which a data set has them that was sampled several times: problem by problem, again and
    again."""
    distinct = -(-num_rows // ways)
    writer = None
    for start in range(0, num_rows, _AT_ONCE):
        places = range(start, min(start + _AT_ONCE, num_rows))
        rows = [
            {
                "data_source": "sums",
                "prompt": [{"role": "user", "content": f"What is {place % distinct} + 1?"}],
                "target": [{"role": "assistant", "content": _trace(place % distinct, place // distinct)}],
                "reward_model": {"style": "rule", "ground_truth": str(place % distinct + 1)},
            }
            for place in places
        ]
        table = pa.Table.from_pylist(rows)
        writer = writer or pq.ParquetWriter(path, table.schema)
        writer.write_table(table)
    assert writer is not None
    writer.close()


def _trace(number: int, way: int) -> str:
    thoughts = " ".join(f"Step {step} of way {way} with {number}." for step in range(10))
    return f"<think>{thoughts}</think> \\boxed{{{number + 1}}}"


def main() -> None:
    """Print one row."""
    num_rows, ways, workers = numbers(1_000_000, 2, 1)
    with tempfile.TemporaryDirectory() as folder:
        file, out = Path(folder) / "rows.parquet", Path(folder) / "out"
        write(file, num_rows, ways)
        before, started = _peak(resource.RUSAGE_SELF), (time.monotonic(), time.process_time())
        prepare(out, workers, train={"kind": "file", "path": str(file)})
        seconds = time.monotonic() - started[0], time.process_time() - started[1]
        card = sources_of(out)["train"]
    found = num_rows, card["rows_out"], card["traces_out"], *(f"{each:.0f}" for each in seconds)
    peaks = before, _peak(resource.RUSAGE_SELF), _peak(resource.RUSAGE_CHILDREN)
    header = ("rows", "prompts", "traces", "seconds", "CPU seconds", "GiB before", "peak GiB", "peak of a worker, GiB")
    show(header, [(*found, *(f"{peak:.2f}" for peak in peaks))])


def _peak(who: int) -> float:
    return resource.getrusage(who).ru_maxrss / (1 << 20)


if __name__ == "__main__":
    main()

"""Assembly of the prepared files from the shards, in row order, with one row group in memory at a time."""

import dataclasses
import itertools
import json
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from luffy.data.merging import MERGED
from luffy.data.parquet import iterate_prompts, read_prompts, write_prompts
from luffy.data.prompt_identity import problem_key
from luffy.data.schema import SCHEMA
from luffy.data.shards import digest, finished_shards
from luffy.errors import DataError
from luffy.files import replacing
from luffy.seeds import derive_seed
from luffy.types import Prompt

EMPTY_COMPLEMENT = (
    "data.rl: the complement is empty, for every training prompt has a trace that SFT gets; lower "
    "data.sft.unique_train_examples, or use train"
)

Mask = npt.NDArray[np.bool_]

LUFFY_SCHEMA = pa.schema(
    [
        ("data_source", pa.string()),
        ("prompt", pa.list_(pa.field("element", pa.struct([("content", pa.string()), ("role", pa.string())])))),
        ("target", pa.list_(pa.field("element", pa.struct([("content", pa.string()), ("role", pa.string())])))),
        ("ability", pa.string()),
        ("reward_model", pa.struct([("ground_truth", pa.string()), ("style", pa.string())])),
        ("extra_info", pa.struct([("index", pa.int64()), ("split", pa.string())])),
    ]
)
"""Columns and nesting of the original project's training file, as its `rl_dataset_with_target.py` reads them."""


def write_rows(path: Path, folder: Path, kept: Mask) -> int:
    """Write the rows of the shards under `folder` that `kept` selects; returns how many."""
    return _write(path, (pq.read_table(file).filter(pa.array(mask)) for file, mask in _shards(folder, kept)))


def write_correct(path: Path, folder: Path, kept: Mask) -> int:
    """Like `write_rows`, but only with verified traces; rows without one are left out."""
    return write_prompts(path, filter(lambda prompt: prompt.traces, map(_correct_only, _prompts(folder, kept))))


def write_complement(
    path: Path,
    folder: Path,
    kept: Mask,
    taken: Collection[str],
    problems: Iterable[int],
    near_duplicates: Collection[int],
) -> int:
    """Write the prompts that `kept` selects and those that lost their traces, all without traces; returns how many.

    Each uid occurs at most once, and never if another split has `taken` it. Among the prompts that lost their traces,
    each problem (`luffy.data.shards.digest`) occurs at most once, and never if it is in `problems` (all splits); those
    with the numbers `near_duplicates` are left out.
    """
    seen, known = set(taken), set(problems)

    def other_problems(prompts: Iterable[Prompt]) -> Iterator[Prompt]:
        for number, prompt in enumerate(prompts):
            problem = digest(problem_key(prompt.messages))
            if problem not in known and number not in near_duplicates:
                known.add(problem)
                yield prompt

    def fresh(prompts: Iterable[Prompt]) -> Iterator[Prompt]:
        for prompt in prompts:
            if prompt.uid not in seen:
                seen.add(prompt.uid)
                yield dataclasses.replace(prompt, traces=())

    lost = other_problems(_lost_their_traces(folder))
    return write_prompts(path, fresh(itertools.chain(_prompts(folder, kept), lost)))


def write_luffy(path: Path, prepared: Path) -> int:
    """Write a prepared file with `LUFFY_SCHEMA`; returns the number of rows. A row keeps its first trace."""
    with pq.ParquetFile(prepared) as file:
        sizes = [file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)]
        starts = itertools.accumulate(sizes, initial=0)
        groups = zip(range(file.num_row_groups), starts, strict=False)
        return _write(path, (_luffy_table(file.read_row_group(group), start) for group, start in groups), LUFFY_SCHEMA)


def _write(path: Path, tables: Iterable[pa.Table], schema: pa.Schema = SCHEMA) -> int:
    count = 0
    with replacing(path) as file, pq.ParquetWriter(file, schema, compression="zstd") as writer:
        for table in tables:
            if len(table):
                writer.write_table(table)
                count += len(table)
    return count


def _shards(folder: Path, kept: Mask) -> Iterator[tuple[Path, Mask]]:
    """Each shard's file with the mask of its kept rows."""
    start = 0
    for finished in finished_shards(folder):
        file = finished.with_suffix(MERGED)
        if not file.is_file():
            file = finished.with_suffix(".parquet")
        end = start + pq.read_metadata(file).num_rows
        yield file, kept[start:end]
        start = end


def _prompts(folder: Path, kept: Mask) -> Iterator[Prompt]:
    for file, mask in _shards(folder, kept):
        if mask.any():
            yield from itertools.compress(iterate_prompts(file), mask)


def _lost_their_traces(folder: Path) -> Iterator[Prompt]:
    for finished in finished_shards(folder):
        file = finished.with_suffix(".complement.parquet")
        if file.is_file():
            yield from iterate_prompts(file)


def _correct_only(prompt: Prompt) -> Prompt:
    return dataclasses.replace(prompt, traces=tuple(trace for trace in prompt.traces if trace.verified))


def _luffy_table(table: pa.Table, first: int) -> pa.Table:
    rows = table.select(LUFFY_SCHEMA.names).to_pylist()
    for number, row in enumerate(rows, start=first):
        extra = json.loads(row["extra_info"])
        index = extra.get("index")
        row["extra_info"] = {
            "index": index if isinstance(index, int) else number,
            "split": str(extra.get("split", "default")),
        }
    return pa.Table.from_pylist(rows, LUFFY_SCHEMA)


def read_demonstrations(folder: Path, num_traces: int | None, seed: int) -> list[Prompt]:
    """The prompts that SFT trains on: those with a trace in the result of `sample`, else of `prepare_data`.

    With `num_traces` a subset that depends on seed and uid alone; DataError where there are fewer.
    """
    sampled = folder / "sampled.parquet"
    prompts = read_prompts(sampled if sampled.exists() else folder / "sft.parquet")
    with_traces = [prompt for prompt in prompts if prompt.traces]
    if num_traces is None:
        return with_traces
    if num_traces > len(with_traces):
        raise DataError(f"sft.num_traces is {num_traces} but only {len(with_traces)} training prompts have a trace")
    return sorted(with_traces, key=lambda prompt: derive_seed(seed, "sft", prompt.uid))[:num_traces]

"""Merging of the rows of one problem into one prompt with the traces of all of them.

    write_merged(folder, rows, selection)

The selection assigns traces to rows. Traces move in two passes with one shard in memory at a time: first every shard
appends its moving traces to the spill files of their target shards, then each target shard is rewritten:

    00007.spill.jsonl       traces for rows of the shard, in the order of the rows they come from
    00007.merged.parquet    the shard with these traces, in place of 00007.parquet
"""

import dataclasses
import itertools
import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from luffy.data.parquet import iterate_prompts, write_prompts
from luffy.data.selection import PassedRows, Selection
from luffy.data.shards import finished_shards
from luffy.types import Message, Prompt, Trace

MERGED = ".merged.parquet"
_SPILL = ".spill.jsonl"


def write_merged(folder: Path, rows: PassedRows, selection: Selection) -> None:
    """Rewrite the shards under `folder` whose rows gain traces; files of an earlier attempt are deleted first."""
    for stale in [*folder.glob(f"*{_SPILL}"), *folder.glob(f"*{MERGED}")]:
        stale.unlink()
    if not selection.taken.any() or not selection.folded.any():
        return
    shards = finished_shards(folder)
    starts = [0, *itertools.accumulate(rows.shard_rows)]
    for number, path in enumerate(shards):
        for target, lines in _spilled(path, rows, selection, starts, number).items():
            with shards[target].with_suffix(_SPILL).open("a", encoding="utf-8") as file:
                file.writelines(lines)
    for path in shards:
        spill = path.with_suffix(_SPILL)
        if spill.is_file():
            write_prompts(path.with_suffix(MERGED), _with_spilled(path, spill))
            spill.unlink()


def _spilled(path: Path, rows: PassedRows, selection: Selection, starts: list[int], shard: int) -> dict[int, list[str]]:
    """The traces that leave a shard, as JSON lines, by target shard."""
    lines: dict[int, list[str]] = defaultdict(list)
    first, end = starts[shard], starts[shard + 1]
    folded = selection.folded[first:end]
    if not folded.any():
        return lines
    ends = np.cumsum(rows.num_traces)
    givers = (np.flatnonzero(folded) + first).tolist()
    for row, prompt in zip(givers, itertools.compress(_prompts(path), folded), strict=True):
        owner = int(selection.owners[row])
        target = int(np.searchsorted(starts, owner, side="right")) - 1
        taken = selection.taken[ends[row] - rows.num_traces[row] : ends[row]]
        for trace in itertools.compress(prompt.traces, taken):
            line = (owner - starts[target], dataclasses.asdict(trace))
            lines[target].append(json.dumps(line) + "\n")
    return lines


def _with_spilled(path: Path, spill: Path) -> Iterator[Prompt]:
    """The shard's rows with the traces that arrive for them."""
    arrived: dict[int, list[Trace]] = defaultdict(list)
    with spill.open(encoding="utf-8") as lines:
        for line in lines:
            row, trace = json.loads(line)
            arrived[row].append(_trace(trace))
    for row, prompt in enumerate(_prompts(path)):
        yield dataclasses.replace(prompt, traces=(*prompt.traces, *arrived[row])) if row in arrived else prompt


def _prompts(path: Path) -> Iterator[Prompt]:
    return iterate_prompts(path.with_suffix(".parquet"))


def _trace(values: dict[str, Any]) -> Trace:
    logprobs, turns = values.pop("logprobs"), values.pop("turns")
    return Trace(
        **values, logprobs=None if logprobs is None else tuple(logprobs), turns=tuple(Message(**turn) for turn in turns)
    )

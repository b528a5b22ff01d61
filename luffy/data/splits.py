"""Assembly of the prepared files from the shards, in row order, with one row group in memory at a time.

    write_merged(folder, rows, selection)
    written = add_traces(out, data_folder, traces_of, config, seed)

`write_merged` makes one prompt of the rows of one problem, with the traces of all of them. The selection assigns traces
to rows. Traces move in two passes with one shard in memory at a time: first every shard appends its moving traces to
the spill files of their target shards, then each target shard is rewritten:

    00007.spill.jsonl       traces for rows of the shard, in the order of the rows they come from
    00007.merged.parquet    the shard with these traces, in place of 00007.parquet

`add_traces` writes the files of prepare_data with more traces. A prompt keeps its own, in front of the new ones. SFT's
rows are chosen as prepare_data chooses them.
"""

import dataclasses
import itertools
import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import TypeAdapter

from luffy.config.data import DataConfig
from luffy.data.parquet import iterate_prompts, read_prompts, write_prompts, write_tables
from luffy.data.selection import Mask, PassedRows, Selection
from luffy.data.shards import finished_shards
from luffy.errors import DataError
from luffy.files import link_or_copy
from luffy.seeds import derive_seed
from luffy.types import Origin, Prompt, Trace

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
    ends = np.cumsum(rows.num_traces)
    for path, (first, end) in zip(shards, itertools.pairwise(starts), strict=True):
        folded = selection.folded[first:end]
        if not folded.any():
            continue
        lines: dict[int, list[str]] = defaultdict(list)  # by target shard
        givers = (np.flatnonzero(folded) + first).tolist()
        prompts = iterate_prompts(path.with_suffix(".parquet"))
        for row, prompt in zip(givers, itertools.compress(prompts, folded), strict=True):
            owner = int(selection.owners[row])
            target = int(np.searchsorted(starts, owner, side="right")) - 1
            taken = selection.taken[ends[row] - rows.num_traces[row] : ends[row]]
            for trace in itertools.compress(prompt.traces, taken):
                lines[target].append(json.dumps((owner - starts[target], dataclasses.asdict(trace))) + "\n")
        for target, of_target in lines.items():
            with shards[target].with_suffix(_SPILL).open("a", encoding="utf-8") as file:
                file.writelines(of_target)
    for path in shards:
        spill = path.with_suffix(_SPILL)
        if spill.is_file():
            write_prompts(path.with_suffix(MERGED), _with_spilled(path, spill))
            spill.unlink()


def _with_spilled(path: Path, spill: Path) -> Iterator[Prompt]:
    arrived: dict[int, list[Trace]] = defaultdict(list)
    spilled = TypeAdapter(tuple[int, Trace])
    with spill.open(encoding="utf-8") as lines:
        for row, trace in map(spilled.validate_json, lines):
            arrived[row].append(trace)
    for row, prompt in enumerate(iterate_prompts(path.with_suffix(".parquet"))):
        yield dataclasses.replace(prompt, traces=(*prompt.traces, *arrived[row])) if row in arrived else prompt


EMPTY_COMPLEMENT = (
    "data.rl: the complement is empty, for every training prompt has a trace that SFT gets; lower "
    "data.sft.unique_train_examples, or use train"
)


def write_rows(path: Path, folder: Path, kept: Mask) -> int:
    """Write the rows of the shards under `folder` that `kept` selects; returns how many."""
    return write_tables(path, (pq.read_table(file).filter(pa.array(mask)) for file, mask in _shards(folder, kept)))


def write_correct(path: Path, folder: Path, kept: Mask) -> int:
    """Like `write_rows`, but only with verified traces; rows without one are left out."""
    return write_prompts(path, (found for prompt in _prompts(folder, kept) if (found := _correct_only(prompt)).traces))


def write_bare(path: Path, folder: Path, kept: Mask) -> int:
    """Like `write_rows`, but without traces."""
    return write_prompts(path, (dataclasses.replace(prompt, traces=()) for prompt in _prompts(folder, kept)))


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


def _correct_only(prompt: Prompt) -> Prompt:
    return dataclasses.replace(prompt, traces=tuple(trace for trace in prompt.traces if trace.verified))


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


TRAIN, SFT, COMPLEMENT, VALIDATION = "train.parquet", "sft.parquet", "rl_complement.parquet", "validation.parquet"


@dataclass(slots=True)
class WrittenData:
    """What `add_traces` wrote."""

    files: list[str] = field(default_factory=lambda: [TRAIN, SFT, COMPLEMENT])
    train_rows: int = 0
    sft_rows: int = 0
    traces: Counter[str] = field(default_factory=Counter)
    """Number of added traces by author (`author:origin` where the data was rewritten); texts that the prompt already
    had are not added."""
    with_logprobs: Counter[str] = field(default_factory=Counter)
    """Number of added traces with log-probabilities, by author."""
    origins: Counter[str] = field(default_factory=Counter)
    """Traces of the training rows by origin; empty where the data was not rewritten."""


def add_traces(
    out: Path,
    folder: Path,
    added: Callable[[str], Sequence[Trace]],
    data: DataConfig,
    seed: int,
    *,
    rewrites: bool = False,
) -> WrittenData:
    """Write the training data in `folder` with the traces that `added` gives each uid to `out`.

    With `rewrites` they take the place of those that the prompt came with, which stay only where there are none.
    DataError if SFT requires more examples than there are, or RL learns from the complement and it is empty.
    """

    written = WrittenData()

    def rows(*, counted: bool = False) -> Iterator[Prompt]:
        for prompt in iterate_prompts(folder / TRAIN):
            known = {trace.text for trace in prompt.traces}
            fresh = tuple(trace for trace in added(prompt.uid) if trace.text not in known)
            kept = (*prompt.traces, *fresh)
            if rewrites:  # the expert's own stay where there are no others
                kept = fresh or tuple(dataclasses.replace(trace, origin=Origin.EXPERT) for trace in prompt.traces)
            if counted:
                written.traces.update(_signed(trace) for trace in fresh)
                written.with_logprobs.update(_signed(trace) for trace in fresh if trace.logprobs is not None)
                written.origins.update(str(trace.origin) for trace in kept if trace.origin is not None)
            yield dataclasses.replace(prompt, traces=kept)

    written.train_rows = write_prompts(out / TRAIN, rows(counted=True))
    # SFT's rows, as `luffy.data.selection.choose_for_sft` chooses them.
    usable = map(_correct_only, rows()) if data.sft.correct_only else rows()
    candidates = [prompt.uid for prompt in usable if prompt.traces]
    wanted = data.sft.unique_train_examples
    if wanted == "all":
        wanted = len(candidates)
    if wanted > len(candidates):
        raise DataError(
            f"data.sft.unique_train_examples: {wanted} asked for, {len(candidates)} training prompts have a trace, "
            "those of teachers included"
        )
    chosen = set(sorted(candidates, key=lambda uid: derive_seed(seed, "sft-view", uid))[:wanted])
    sft = (prompt for prompt in rows() if prompt.uid in chosen)
    written.sft_rows = write_prompts(out / SFT, map(_correct_only, sft) if data.sft.correct_only else sft)
    bare = (dataclasses.replace(prompt, traces=()) for prompt in rows() if prompt.uid not in chosen)
    if not write_prompts(out / COMPLEMENT, bare) and data.rl == "complement":
        raise DataError(EMPTY_COMPLEMENT)
    if (folder / VALIDATION).is_file():
        link_or_copy(str(folder / VALIDATION), str(out / VALIDATION))
        written.files.append(VALIDATION)
    return written


def _signed(trace: Trace) -> str:
    return trace.author if trace.origin is None else f"{trace.author}:{trace.origin}"

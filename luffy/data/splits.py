"""Assembly of the prepared files from the shards, in row order, with one shard in memory at a time.

    rows = PassedPrompts(folder, given_traces(folder, rows, selection))
    rows.write(path, kept)
    written = add_traces(out, data_folder, traces_of, config, seed)

Where rows of one problem are merged, their traces are in memory until they are written to the prompt that gets them.

`add_traces` writes the files of prepare_data with more traces. A prompt keeps its own, in front of the new ones. SFT's
rows are chosen as prepare_data chooses them.
"""

import dataclasses
import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from luffy.config.data import DataConfig
from luffy.data.parquet import iterate_prompts, read_prompts, write_prompts, write_tables
from luffy.data.schema import record_batch
from luffy.data.selection import Mask, PassedRows, Selection
from luffy.data.shards import finished_shards
from luffy.errors import DataError
from luffy.files import link_or_copy
from luffy.seeds import derive_seed
from luffy.types import Origin, Prompt, Trace


def given_traces(folder: Path, rows: PassedRows, selection: Selection) -> dict[int, list[Trace]]:
    """The traces that rows get from later rows of the same problem, by the number of the row, in the rows' order."""
    found: dict[int, list[Trace]] = defaultdict(list)
    if not selection.taken.any() or not selection.folded.any():
        return found
    ends = np.cumsum(rows.num_traces)
    for start, file in _shards(folder):
        folded = selection.folded[start : start + pq.read_metadata(file).num_rows]
        givers = (np.flatnonzero(folded) + start).tolist()
        prompts = iterate_prompts(file) if givers else iter(())
        for row, prompt in zip(givers, itertools.compress(prompts, folded), strict=True):
            taken = selection.taken[ends[row] - rows.num_traces[row] : ends[row]]
            found[int(selection.owners[row])] += itertools.compress(prompt.traces, taken)
    return found


def _shards(folder: Path) -> Iterator[tuple[int, Path]]:
    """Each shard's file with the number of its first row."""
    start = 0
    for finished in finished_shards(folder):
        file = finished.with_suffix(".parquet")
        yield start, file
        start += pq.read_metadata(file).num_rows


@dataclass(frozen=True, slots=True)
class PassedPrompts:
    """The prompts in the shards under `folder`, with the traces that they were `given`."""

    folder: Path
    given: Mapping[int, Sequence[Trace]] = field(default_factory=dict)

    def write(self, path: Path, kept: Mask) -> int:
        """Write the rows that `kept` selects; returns how many."""

        def tables() -> Iterator[pa.Table | pa.RecordBatch]:
            for start, file in _shards(self.folder):
                num_rows = pq.read_metadata(file).num_rows
                mask = kept[start : start + num_rows]
                if self.given.keys().isdisjoint(range(start, start + num_rows)):
                    yield pq.read_table(file).filter(pa.array(mask))
                else:
                    yield record_batch(list(itertools.compress(self._prompts(start, file), mask)))

        return write_tables(path, tables())

    def write_correct(self, path: Path, kept: Mask) -> int:
        """Like `write`, but only with verified traces; rows without one are left out."""
        return write_prompts(path, (found for prompt in self._kept(kept) if (found := _correct_only(prompt)).traces))

    def write_bare(self, path: Path, kept: Mask) -> int:
        """Like `write`, but without traces."""
        return write_prompts(path, (dataclasses.replace(prompt, traces=()) for prompt in self._kept(kept)))

    def _kept(self, kept: Mask) -> Iterator[Prompt]:
        for start, file in _shards(self.folder):
            mask = kept[start : start + pq.read_metadata(file).num_rows]
            if mask.any():
                yield from itertools.compress(self._prompts(start, file), mask)

    def _prompts(self, start: int, file: Path) -> Iterator[Prompt]:
        for row, prompt in enumerate(iterate_prompts(file), start):
            more = self.given.get(row, ())
            yield dataclasses.replace(prompt, traces=(*prompt.traces, *more)) if more else prompt


EMPTY_COMPLEMENT = (
    "data.rl: the complement is empty, for every training prompt has a trace that SFT gets; lower "
    "data.sft.unique_train_examples, or use train"
)


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

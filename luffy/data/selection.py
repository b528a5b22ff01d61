"""Decisions that need all rows of a source: repeats, the validation split, the SFT view.

Everything is a function of the rows' order, their uids and the seed. A row takes about 300 bytes here, independent of
the length of its traces.
"""

from collections import Counter
from dataclasses import dataclass, fields, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow.parquet as pq

from luffy.config.data import DataConfig
from luffy.data.overlap import near_duplicate_clusters
from luffy.data.row_filters import Rejection, Rules
from luffy.data.shards import finished_shards
from luffy.errors import DataError
from luffy.seeds import derive_seed

Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class PassedRows:
    """The rows of a source that passed the rules for single rows, in order."""

    prompt_tokens: npt.NDArray[np.int32]
    num_traces: npt.NDArray[np.int32]
    trace_tokens: npt.NDArray[np.int32]
    """Lengths of all traces, row by row."""
    uids: npt.NDArray[np.object_]
    problems: npt.NDArray[np.uint64]
    """Hashes of the problems; empty when repeats are allowed. The same holds for `answers` (with the grader's name) and
    `traces`."""
    answers: npt.NDArray[np.uint64]
    traces: npt.NDArray[np.uint64]
    """Hashes of all traces, row by row."""
    sketches: npt.NDArray[np.uint16]
    """MinHash signatures of the problems; empty when near duplicates are not filtered."""
    all_verified: Mask
    any_verified: Mask
    """Rows with a trace that was graded correct."""

    def __len__(self) -> int:
        return len(self.prompt_tokens)

    def lengths_of_traces(self, kept: Mask) -> npt.NDArray[np.int32]:
        return self.trace_tokens[np.repeat(kept, self.num_traces)]


def read_passed_rows(folder: Path) -> PassedRows:
    """Return the records in the shards under `folder` of the rows that passed."""
    finished = finished_shards(folder)
    if not finished:
        raise DataError(f"{folder}: holds no finished shard; start the stage again")
    shards = [np.load(path.with_suffix(".npz")) for path in finished]
    names = [part.name for part in fields(PassedRows) if part.name != "uids"]
    joined = {name: np.concatenate([shard[name] for shard in shards]) for name in names}
    # Not an array of text, in which every uid takes as much memory as the longest and loses trailing zero bytes.
    columns = [pq.read_table(path.with_suffix(".parquet"), columns=["uid"])["uid"] for path in finished]
    uids = np.array([uid for column in columns for uid in column.to_pylist()], dtype=np.object_)
    return PassedRows(uids=uids, **joined)


@dataclass(frozen=True, slots=True)
class Selection:
    """What happens to each row, given the others."""

    kept: Mask
    rejected: Counter[str]
    owners: npt.NDArray[np.int64]
    """The row that each row's traces belong to: an earlier one for a row that is merged or folded, else itself. What
    happens to that row later happens to the traces."""
    taken: Mask
    """Mask over all traces: those that are used. A merged row may repeat some of its owner's."""

    @property
    def folded(self) -> Mask:
        """Rows that are merged into an earlier one, or folded into it."""
        return self.owners != np.arange(len(self.owners))

    def repeats(self) -> dict[int, int]:
        """Return how many problems have 2, 3 and more rows, those merged or folded included."""
        sizes = np.bincount(self.owners[self.folded]) + 1
        return {int(size): int(count) for size, count in enumerate(np.bincount(sizes[sizes > 1])) if count}


def select(rows: PassedRows, rules: Rules) -> Selection:
    """Return which rows stay: those whose problem repeats none of an earlier row, exactly or nearly (`rules`)."""
    kept, numbers = np.ones(len(rows), dtype=np.bool_), np.arange(len(rows))
    selection = Selection(kept, Counter(), numbers.copy(), np.ones(len(rows.trace_tokens), dtype=np.bool_))
    if rules.repeats == "allow":
        return selection
    firsts = _firsts(rows.uids, kept)
    # A file may give one uid to two problems.
    _reject(selection, rows.problems != rows.problems[firsts], Rejection.DUPLICATE)
    firsts = _firsts(rows.problems if rules.unique_problems else rows.uids, kept)
    repeats = kept & (firsts != numbers)
    other = repeats & (rows.answers != rows.answers[firsts])
    _reject(selection, other, Rejection.OTHER_ANSWER)
    repeats &= ~other
    joined = np.zeros(len(rows), dtype=np.bool_)
    if rules.repeats == "fold":
        joined = repeats.copy()
    elif rules.repeats == "merge":
        joined = _take_new_traces(rows, selection, repeats, firsts)
    selection.owners[joined] = firsts[joined]
    kept[joined] = False
    same_uid = rows.uids == rows.uids[firsts]
    _reject(selection, repeats & ~joined & same_uid, Rejection.DUPLICATE)
    _reject(selection, repeats & ~joined & ~same_uid, Rejection.EQUAL_PROBLEM)
    if rules.near_duplicates is not None:
        # A row that is already rejected must not head a cluster, or no row of the cluster would be left. A row that was
        # merged into another states the same problem.
        candidates, heads = np.flatnonzero(kept), numbers.copy()
        heads[candidates] = candidates[near_duplicate_clusters(rows.sketches[candidates], rules.near_duplicates)]
        _reject(selection, heads != numbers, Rejection.NEAR_DUPLICATE)
        # Rows that were merged into a rejected near duplicate are rejected with it.
        orphans = selection.folded & ~kept[selection.owners]
        selection.owners[orphans] = numbers[orphans]
        _reject(selection, orphans, Rejection.NEAR_DUPLICATE)
    return selection


def merged(rows: PassedRows, selection: Selection) -> PassedRows:
    """Return the rows with their traces after merging; a row that was merged into another has none left."""
    if not selection.folded.any():
        return rows
    owners = np.repeat(selection.owners, rows.num_traces)[selection.taken]
    order = np.argsort(owners, kind="stable")
    verified = np.ones(len(rows), dtype=np.bool_)
    np.logical_and.at(verified, selection.owners, rows.all_verified)
    some_verified = np.zeros(len(rows), dtype=np.bool_)
    np.logical_or.at(some_verified, selection.owners, rows.any_verified)
    return replace(
        rows,
        num_traces=np.bincount(owners, minlength=len(rows)).astype(np.int32),
        trace_tokens=rows.trace_tokens[selection.taken][order],
        traces=rows.traces[selection.taken][order],
        all_verified=verified,
        any_verified=some_verified,
    )


def hold_out(rows: PassedRows, kept: Mask, count: int, seed: int) -> Mask:
    """Return the `count` rows of the validation split, chosen by seed and uid; DataError where none would be left."""
    available = int(kept.sum())
    if count and count >= available:
        raise DataError(f"data.validation_prompts: {count} of the {available} training prompts would leave none")
    return _earliest(rows, kept, count, seed, "validation")


def choose_for_sft(rows: PassedRows, training: Mask, data: DataConfig, seed: int) -> Mask:
    """Return the rows of the SFT view, chosen by seed and uid; DataError where there are not as many."""
    wanted = data.sft.unique_train_examples
    candidates = training & (rows.num_traces > 0)
    if data.sft.correct_only:
        candidates &= rows.any_verified
    if wanted == "all":
        return candidates
    available = int(candidates.sum())
    if wanted > available:
        needed = "a correct trace" if data.sft.correct_only else "a trace"
        raise DataError(
            f"data.sft.unique_train_examples: {wanted} asked for, {available} training prompts have {needed}"
        )
    return _earliest(rows, candidates, wanted, seed, "sft-view")


def _firsts(values: np.ndarray, among: Mask) -> npt.NDArray[np.int64]:
    """For each row in `among`, the first row of them with the same value; all other rows map to themselves."""
    firsts, indices = np.arange(len(values)), np.flatnonzero(among)
    _, first, inverse = np.unique(values[indices], return_index=True, return_inverse=True)
    firsts[indices] = indices[first[inverse]]
    return firsts


def _take_new_traces(rows: PassedRows, selection: Selection, repeats: Mask, firsts: npt.NDArray[np.int64]) -> Mask:
    """Which of the `repeats` have a trace that no earlier row has; only such traces stay marked as taken."""
    ends = np.cumsum(rows.num_traces)
    known: dict[int, set[int]] = {}
    bringing = np.zeros(len(rows), dtype=np.bool_)

    def keys_of(row: int) -> list[int]:
        return rows.traces[ends[row] - rows.num_traces[row] : ends[row]].tolist()

    for row in np.flatnonzero(repeats).tolist():
        first = int(firsts[row])
        seen = known.setdefault(first, set(keys_of(first)))
        for place, key in enumerate(keys_of(row), start=int(ends[row] - rows.num_traces[row])):
            selection.taken[place] = key not in seen
            bringing[row] |= key not in seen
            seen.add(key)
    return bringing


def _reject(selection: Selection, rows: Mask, reason: Rejection) -> None:
    if rows.any():
        selection.rejected[reason] += int(rows.sum())
        selection.kept[rows] = False


def _earliest(rows: PassedRows, among: Mask, count: int, seed: int, purpose: str) -> Mask:
    chosen = np.zeros(len(rows), dtype=np.bool_)
    indices = np.flatnonzero(among)
    order = sorted(indices.tolist(), key=lambda index: derive_seed(seed, purpose, str(rows.uids[index])))
    chosen[order[:count]] = True
    return chosen

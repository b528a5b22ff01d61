"""What is decided over all rows of a source: repeats, difficulty, the validation split, the SFT view.

Everything is a function of the rows' order, their uids and the seed; a row takes some 300 bytes here, whatever the
length of its traces.
"""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from luffy.config.data import DataConfig
from luffy.data.filters import Rejection, Rules
from luffy.data.near_duplicates import earlier_likeness
from luffy.data.shards import finished_shards
from luffy.errors import DataError
from luffy.seeds import derive_seed

Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class PassedRows:
    """The rows of a source that passed on their own, in order."""

    shard_rows: tuple[int, ...]
    """How many each shard has."""
    prompt_tokens: npt.NDArray[np.int32]
    num_traces: npt.NDArray[np.int32]
    trace_tokens: npt.NDArray[np.int32]
    """Of all traces, row after row."""
    uids: npt.NDArray[np.str_]
    problems: npt.NDArray[np.uint64]
    """Of sources that must not repeat a problem, else empty; likewise `sketches`, of near duplicates."""
    sketches: npt.NDArray[np.uint16]
    all_verified: Mask

    def __len__(self) -> int:
        return len(self.prompt_tokens)

    def lengths_of_traces(self, kept: Mask) -> npt.NDArray[np.int32]:
        """Return the lengths of the traces of some rows."""
        return self.trace_tokens[np.repeat(kept, self.num_traces)]

    def shortest_traces(self) -> npt.NDArray[np.int64]:
        """Return the tokens of each row's shortest trace; 0 for rows without any."""
        shortest = np.zeros(len(self), dtype=np.int64)
        with_traces = np.flatnonzero(self.num_traces)
        starts = (np.cumsum(self.num_traces) - self.num_traces)[with_traces]
        if len(starts):
            shortest[with_traces] = np.minimum.reduceat(self.trace_tokens, starts)
        return shortest


def read_passed_rows(folder: Path) -> PassedRows:
    """Return what the shards under `folder` say about the rows that passed."""
    shards = [np.load(path.with_suffix(".npz")) for path in finished_shards(folder)]
    if not shards:
        raise DataError(f"{folder}: holds no finished shard; start the stage again")
    names = ("prompt_tokens", "num_traces", "trace_tokens", "uids", "problems", "sketches", "all_verified")
    joined = {name: np.concatenate([shard[name] for shard in shards]) for name in names}
    return PassedRows(shard_rows=tuple(len(shard["prompt_tokens"]) for shard in shards), **joined)


def select(rows: PassedRows, rules: Rules) -> tuple[Mask, Counter[str]]:
    """Return which rows are no repeat of an earlier one, and how many are, by reason."""
    kept = np.ones(len(rows), dtype=np.bool_)
    rejected: Counter[str] = Counter()
    if rules.allow_repeats:
        return kept, rejected

    def reject(repeats: Mask, reason: Rejection) -> None:
        newly = kept & repeats
        if newly.any():
            rejected[reason] += int(newly.sum())
            kept[newly] = False

    reject(_repeats(rows.uids), Rejection.DUPLICATE)
    if rules.unique_problems:
        reject(_repeats(rows.problems), Rejection.EQUAL_PROBLEM)
    if rules.near_duplicates is not None:
        first = earlier_likeness(rows.sketches, rules.near_duplicates)
        reject(first != np.arange(len(rows)), Rejection.NEAR_DUPLICATE)
    return kept, rejected


def keep_difficulty(rows: PassedRows, kept: Mask, data: DataConfig) -> tuple[Mask, Counter[str]]:
    """Return the rows on the wanted side of the boundary; rows without a trace have no difficulty and stay."""
    filters = data.filters
    lengths = rows.shortest_traces()
    with_traces = kept & (lengths > 0)
    if filters.difficulty is None or not with_traces.any():
        return kept, Counter()
    boundary = filters.difficulty_boundary_tokens or float(np.median(lengths[with_traces]))
    is_hard = lengths > boundary
    other = with_traces & (is_hard if filters.difficulty == "easy" else ~is_hard)
    return kept & ~other, Counter({str(Rejection.OTHER_DIFFICULTY): int(other.sum())})


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
    if wanted == "all":
        return candidates
    available = int(candidates.sum())
    if wanted > available:
        raise DataError(
            f"data.sft.unique_train_examples: {wanted} asked for, {available} training prompts have a trace"
        )
    return _earliest(rows, candidates, wanted, seed, "sft-view")


def _repeats(values: np.ndarray) -> Mask:
    _, first = np.unique(values, return_index=True)
    repeats = np.ones(len(values), dtype=np.bool_)
    repeats[first] = False
    return repeats


def _earliest(rows: PassedRows, among: Mask, count: int, seed: int, purpose: str) -> Mask:
    chosen = np.zeros(len(rows), dtype=np.bool_)
    indices = np.flatnonzero(among)
    order = sorted(indices.tolist(), key=lambda index: derive_seed(seed, purpose, str(rows.uids[index])))
    chosen[order[:count]] = True
    return chosen

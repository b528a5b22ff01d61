"""Accuracy of one configuration over its seeds, on one suite under one decoding."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from luffy.errors import LuffyError
from luffy.evaluation.checkpoint_scores import CheckpointScores
from luffy.evaluation.method_comparison.arms import FinishedSeed
from luffy.evaluation.results import Cell
from luffy.statistics.accuracy import Estimate
from luffy.statistics.over_seeds import seeded_accuracy


@dataclass(frozen=True, slots=True)
class Score:
    """An arm on one suite under one decoding."""

    estimate: Estimate
    by_seed: Mapping[int, float]


def score(seeds: Sequence[FinishedSeed], cell: Cell, confidence: float) -> Score:
    """The score over `seeds`, at least one. Raises LuffyError where seeds were evaluated on different problems."""
    k = num_samples(seeds[0].evaluation, cell)
    uids = list(seeds[0].evaluation.correct[cell])
    counts = [[correct_by_problem(seed, cell, uids)[uid] for uid in uids] for seed in seeds]
    by_seed = {seed.seed: sum(row) / (k * len(uids)) for seed, row in zip(seeds, counts, strict=True)}
    return Score(seeded_accuracy(counts, k, confidence), by_seed)


def correct_by_problem(seed: FinishedSeed, cell: Cell, uids: Sequence[str]) -> Mapping[str, int]:
    """Correct responses of one seed; LuffyError where its problems are not those in `uids`."""
    found = seed.evaluation.correct[cell]
    if found.keys() != set(uids):
        raise LuffyError(f"arms were evaluated on different problems of {cell[0]}; run the comparison again")
    return found


def num_samples(evaluation: CheckpointScores, cell: Cell) -> int:
    """Responses to each problem."""
    row = evaluation.row(cell)
    assert row is not None
    return row.num_samples

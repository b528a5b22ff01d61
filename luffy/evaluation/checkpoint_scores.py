"""How often a checkpoint solved each problem: the input of paired comparisons."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from luffy.evaluation.results import RESULTS_FILE, Cell, EvaluationResults, ResultRow, count_correct, read_results
from luffy.evaluation.sample_files import read_samples_of


@dataclass(frozen=True, slots=True)
class CheckpointScores:
    """An evaluated checkpoint: its results, and how often it solved each problem."""

    results: EvaluationResults
    correct: Mapping[Cell, Mapping[str, int]]
    """Correct responses by problem."""

    @property
    def checkpoint(self) -> str:
        return self.results.checkpoint

    def row(self, cell: Cell) -> ResultRow | None:
        """The result on a suite under a decoding, if it was evaluated."""
        return next((row for row in self.results.rows if (row.suite, row.decoding) == cell), None)


def read_scores(directory: Path) -> CheckpointScores:
    """The scores of the finished evaluation in `directory`."""
    return CheckpointScores(read_results(directory / RESULTS_FILE), count_correct(read_samples_of(directory)))

"""A finished evaluation on disk: its results, its responses, and how often it solved each problem."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from luffy.errors import DataError
from luffy.evaluation.results import RESULTS_FILE, Cell, EvaluationResults, ResultRow, count_correct, read_results
from luffy.evaluation.sample_files import SAMPLES_FILE, find_samples, read_samples_of
from luffy.evaluation.sample_records import SampleRecord


@dataclass(frozen=True, slots=True)
class FinishedEvaluation:
    """Results of an evaluation, and access to its responses."""

    directory: Path
    results: EvaluationResults

    def records(self) -> Iterator[SampleRecord]:
        """Yield all graded responses in the order of the results; DataError where the file holds something else."""
        return read_samples_of(self.directory)


def read_evaluation(directory: Path) -> FinishedEvaluation:
    """Read the directory of a finished evaluation; DataError where there is none."""
    missing = [] if (directory / RESULTS_FILE).is_file() else [RESULTS_FILE]
    missing += [] if find_samples(directory) is not None else [SAMPLES_FILE]
    if missing:
        raise DataError(
            f"{directory}: is no finished evaluation (it has no {missing[0]}); give "
            "workspace/runs/RUN/stages/evaluate_rl or workspace/stages/evaluate/KEY"
        )
    return FinishedEvaluation(directory, read_results(directory / RESULTS_FILE))


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

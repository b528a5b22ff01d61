"""A finished evaluation on disk, for rescoring and comparing it."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from luffy.errors import DataError
from luffy.evaluation.results import RESULTS_FILE, EvaluationResults, read_results
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

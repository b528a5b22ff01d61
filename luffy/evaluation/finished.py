"""A finished evaluation as it lies on disk, for those who grade it again or compare it."""

from dataclasses import dataclass
from pathlib import Path

from luffy.errors import DataError
from luffy.evaluation.results import (
    RESULTS_FILE,
    SAMPLES_FILE,
    EvaluationResults,
    SampleRecord,
    read_results,
    read_sample_records,
)

Cell = tuple[str, str]
"""Suite and decoding."""


@dataclass(frozen=True, slots=True)
class FinishedEvaluation:
    """Results and the responses behind them."""

    directory: Path
    results: EvaluationResults
    records: dict[Cell, list[SampleRecord]]
    """In the order of the results."""


def read_evaluation(directory: Path) -> FinishedEvaluation:
    """Read the directory of a finished evaluation; DataError where there is none."""
    for name in (RESULTS_FILE, SAMPLES_FILE):
        if not (directory / name).is_file():
            raise DataError(
                f"{directory}: is no finished evaluation (it has no {name}); give "
                "workspace/runs/RUN/stages/evaluate_rl or workspace/stages/evaluate/KEY"
            )
    records: dict[Cell, list[SampleRecord]] = {}
    try:
        for record in read_sample_records(directory / SAMPLES_FILE):
            records.setdefault((record.suite, record.decoding), []).append(record)
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{directory / SAMPLES_FILE}: holds no graded responses ({error})") from None
    return FinishedEvaluation(directory, read_results(directory / RESULTS_FILE), records)

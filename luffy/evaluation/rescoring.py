"""Grading the saved responses of an evaluation again, by another grader, without generating anything."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from luffy.config.grading import GraderKind
from luffy.data.parquet import read_prompts
from luffy.errors import DataError
from luffy.evaluation.finished import Cell, FinishedEvaluation
from luffy.evaluation.opinions import opinions
from luffy.evaluation.results import (
    RESULTS_FILE,
    SAMPLES_FILE,
    EvaluationResults,
    ResultRow,
    SampleRecord,
    result_row,
    write_results,
    write_sample_records,
)
from luffy.evaluation.summary import SUMMARY_FILE, render_summary
from luffy.files import write_atomic
from luffy.grading import GradeRequest, GraderPool, Problem, problem_of

_BATCH = 1024
"""Responses that are graded at a time."""


@dataclass(frozen=True, slots=True)
class Regraded:
    """A suite under a decoding, before and after."""

    before: ResultRow
    after: ResultRow
    changed: tuple[tuple[SampleRecord, SampleRecord], ...]
    """Responses that one of the graders calls correct and the other does not: as they were, and as they are."""


def read_problems(suites: Path, names: Sequence[str]) -> dict[tuple[str, str], Problem]:
    """What graders may know of the problems of the suites `names`, by suite and uid; DataError without their files."""
    found: dict[tuple[str, str], Problem] = {}
    for name in names:
        path = suites / f"{name}.parquet"
        if not path.is_file():
            raise DataError(f"{path}: is not there, and the grader needs the questions; prepare the data again")
        found |= {(name, prompt.uid): problem_of(prompt) for prompt in read_prompts(path)}
    return found


def regrade(
    evaluation: FinishedEvaluation,
    kind: GraderKind,
    grader: GraderPool,
    problems: Mapping[tuple[str, str], Problem],
    suites: Sequence[str],
    progress: Callable[[int], None] = lambda count: None,
) -> dict[Cell, list[SampleRecord]]:
    """Return the records of the `suites` with the verdicts of `kind`; `progress` is told how many are done.

    A problem that is not among `problems` is graded without its question and options.
    """
    regraded: dict[Cell, list[SampleRecord]] = {}
    for cell, records in evaluation.records.items():
        if cell[0] not in suites:
            continue
        regraded[cell] = []
        for start in range(0, len(records), _BATCH):
            batch = records[start : start + _BATCH]
            requests = [
                GradeRequest(
                    record.response, record.ground_truth, problems.get((record.suite, record.uid), Problem()), kind
                )
                for record in batch
            ]
            verdicts = opinions(grader, requests)
            regraded[cell] += [verdict.entered(record) for verdict, record in zip(verdicts, batch, strict=True)]
            progress(len(batch))
    return regraded


def compare_gradings(evaluation: FinishedEvaluation, regraded: Mapping[Cell, Sequence[SampleRecord]]) -> list[Regraded]:
    """Return what the new verdicts change, a suite and decoding each, in the order of the results."""
    rows = {(row.suite, row.decoding): row for row in evaluation.results.rows}
    return [
        Regraded(
            rows[cell],
            result_row(records, evaluation.results.confidence, rows[cell].protocol),
            tuple(
                (old, new)
                for old, new in zip(evaluation.records[cell], records, strict=True)
                if old.correct != new.correct
            ),
        )
        for cell, records in regraded.items()
    ]


def write_regraded(
    folder: Path, evaluation: FinishedEvaluation, comparison: Sequence[Regraded], records: Sequence[SampleRecord]
) -> None:
    """Write to `folder` what an evaluation with the new grader would have written."""
    folder.mkdir(parents=True, exist_ok=True)
    results = EvaluationResults(
        checkpoint=evaluation.results.checkpoint,
        confidence=evaluation.results.confidence,
        rows=tuple(part.after for part in comparison),
    )
    write_sample_records(folder / SAMPLES_FILE, records)
    write_results(folder / RESULTS_FILE, results)
    write_atomic(folder / SUMMARY_FILE, render_summary(results))

"""Grading the saved responses of an evaluation again, by another grader, without generating anything."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from luffy.config.evaluation import VALIDATION
from luffy.config.grading import GraderKind
from luffy.data.parquet import VALIDATION_FILE, read_prompts
from luffy.errors import DataError
from luffy.evaluation.results import Cell, EvaluationResults, FinishedEvaluation, ResultRow, write_counted
from luffy.evaluation.sample_files import SAMPLES_FILE, SampleRecord, write_sample_records
from luffy.grading.extract import asks_for_tag
from luffy.grading.pool import GraderPool
from luffy.grading.request import TOKENS, GradeRequest, Problem, problem_of, require_verdicts

_BATCH = 1024
"""Responses that are graded at a time."""
Verdicts = tuple[SampleRecord, SampleRecord]
"""A response with its old grade and with its new one."""


@dataclass(frozen=True, slots=True)
class Regraded:
    """A suite under a decoding, before and after."""

    before: ResultRow
    after: ResultRow
    changed: tuple[Verdicts, ...]
    """Responses that one of the graders calls correct and the other does not, without their texts."""


def read_problems(suites: Path, names: Sequence[str]) -> dict[tuple[str, str], Problem]:
    """What graders need of the problems of the suites `names`, by suite and uid; DataError without their files."""
    found: dict[tuple[str, str], Problem] = {}
    for name in names:
        path = suites / f"{name}.parquet"
        if name == VALIDATION and not path.is_file():
            path = suites.parent / VALIDATION_FILE
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
) -> Iterator[Verdicts]:
    """Yield each response of the `suites` with its old grade and the new one.

    A problem that is not among `problems` is graded without its question and options.
    """
    chosen = (record for record in evaluation.records() if record.suite in suites)
    while batch := list(itertools.islice(chosen, _BATCH)):
        requests = [
            GradeRequest(
                record.graded_text,
                record.ground_truth,
                replace(problems.get((record.suite, record.uid), Problem()), in_tag=asks_for_tag(record.prompt)),
                kind,
                {TOKENS: record.num_tokens, **record.measures},
                record.has_failed,
            )
            for record in batch
        ]
        grades = grader.grade(requests)
        require_verdicts(
            grades,
            "responses",
            "no file is written, verdicts are kept, and the same command asks for the others",
        )
        yield from ((record, record.graded(kind.kind, grade)) for record, grade in zip(batch, grades, strict=True))


def write_regraded(
    folder: Path,
    evaluation: FinishedEvaluation,
    regraded: Iterable[Verdicts],
    write_pages: Callable[[Path, EvaluationResults], None],
) -> list[Regraded]:
    """Write to `folder` what an evaluation with the new grader would have written.

    Returns the changes for each suite and decoding, in the order of the results.
    """
    folder.mkdir(parents=True, exist_ok=True)
    changed: dict[Cell, list[Verdicts]] = {}

    def counted() -> Iterator[SampleRecord]:
        for old, new in regraded:
            if old.correct != new.correct:
                # Responses may be long, and many.
                without_texts = replace(old, prompt="", response=""), replace(new, prompt="", response="")
                changed.setdefault((new.suite, new.decoding), []).append(without_texts)
            yield new

    write_sample_records(folder / SAMPLES_FILE, counted())
    graded = evaluation.results
    before = {(row.suite, row.decoding): row for row in graded.rows}
    protocols = {cell: row.protocol for cell, row in before.items() if row.protocol is not None}
    results = write_counted(folder, graded.checkpoint, graded.confidence, protocols, write_pages)
    after = {(row.suite, row.decoding): row for row in results.rows}
    return [Regraded(before[cell], row, tuple(changed.get(cell, ()))) for cell, row in after.items()]

"""What an evaluation writes: `samples.jsonl`, a line a response, and `results.json`, a row a suite and decoding."""

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from pydantic import Field, ValidationError

from luffy.config.strict import StrictModel
from luffy.errors import LuffyError
from luffy.evaluation.statistics import accuracy, pass_at_k
from luffy.files import replacing, write_atomic
from luffy.types import FinishReason, Outcome

RESULTS_FILE = "results.json"
SAMPLES_FILE = "samples.jsonl"


@dataclass(frozen=True, slots=True)
class SampleRecord:
    """One graded response."""

    suite: str
    decoding: str
    uid: str
    """Of the problem."""
    sample: int
    """Which of the problem's responses, from 0."""
    seed: int
    prompt: str
    """As the model saw it: chat template applied."""
    response: str
    answer: str | None
    """What was extracted and held against the reference."""
    ground_truth: str
    outcome: str
    reason: str
    """Why grading found that, in a short phrase."""
    correct: bool
    finish_reason: str
    num_tokens: int
    """Of the response, stop token included."""


class ResultRow(StrictModel):
    """One checkpoint on one suite under one decoding."""

    suite: str
    decoding: str
    num_problems: int
    num_samples: int
    """Responses a problem."""
    accuracy: float
    """Mean over all responses (avg@k)."""
    interval: tuple[float, float]
    """Over problems: what another set of problems of this kind would give (`luffy.evaluation.statistics`)."""
    outcomes: dict[str, int]
    """Responses by what grading found; outcomes that never occurred are 0."""
    mean_tokens: float
    """Of a response."""
    truncated_share: float
    """Responses that ran into the length limit."""
    pass_at_k: dict[str, float] = Field(default_factory=dict)
    """For k = 1, 2, 4, ... up to the number of samples; empty with one sample."""


class EvaluationResults(StrictModel):
    """All rows of one checkpoint."""

    checkpoint: str
    """`base`, `sft` or `rl`."""
    confidence: float
    """Level of the intervals."""
    rows: tuple[ResultRow, ...]


def result_row(records: Sequence[SampleRecord], confidence: float) -> ResultRow:
    """The row of one suite and decoding; LuffyError unless every problem has the same number of responses."""
    counts = correct_counts(records)
    sizes = {uid: sum(1 for _ in group) for uid, group in _by_problem(records).items()}
    num_samples = max(sizes.values(), default=0)
    short = [uid for uid, size in sizes.items() if size != num_samples]
    if not records or short:
        raise LuffyError(f"{len(short)} problems have fewer than {num_samples} responses, e.g. {short[:1]}")
    correct = list(counts.values())
    estimate = accuracy(correct, num_samples, confidence)
    return ResultRow(
        suite=records[0].suite,
        decoding=records[0].decoding,
        num_problems=len(counts),
        num_samples=num_samples,
        accuracy=estimate.value,
        interval=estimate.interval,
        outcomes={outcome.value: sum(record.outcome == outcome for record in records) for outcome in Outcome},
        mean_tokens=sum(record.num_tokens for record in records) / len(records),
        truncated_share=sum(record.finish_reason == FinishReason.LENGTH for record in records) / len(records),
        pass_at_k={str(k): pass_at_k(correct, num_samples, k) for k in _powers_of_two(num_samples)},
    )


def correct_counts(records: Iterable[SampleRecord]) -> dict[str, int]:
    """Correct responses by problem, in the order in which the problems appear."""
    counts: dict[str, int] = {}
    for record in records:
        counts[record.uid] = counts.get(record.uid, 0) + record.correct
    return counts


def write_results(path: Path, results: EvaluationResults) -> None:
    """Write `results.json`, atomically."""
    write_atomic(path, results.model_dump_json(indent=1) + "\n")


def read_results(path: Path) -> EvaluationResults:
    """What `write_results` wrote; LuffyError names the file when it is missing or something else."""
    try:
        return EvaluationResults.model_validate_json(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, ValidationError) as error:
        raise LuffyError(f"{path}: not the results of an evaluation ({error})") from None


def write_sample_records(path: Path, records: Iterable[SampleRecord]) -> None:
    """Write one record a line, atomically."""
    write_atomic(path, "".join(json.dumps(asdict(record), ensure_ascii=False) + "\n" for record in records))


def read_sample_records(path: Path) -> Iterator[SampleRecord]:
    """Yield the records of a file; KeyError or TypeError when it was not written by `write_sample_records`."""
    names = [field.name for field in fields(SampleRecord)]
    with path.open(encoding="utf-8") as file:
        for line in file:
            values = json.loads(line)
            yield SampleRecord(**{name: values[name] for name in names})


def join_sample_records(path: Path, parts: Iterable[Path]) -> None:
    """Write the records of `parts`, one file after the other, to `path`: all of them or nothing."""
    with replacing(path) as target:
        for part in parts:
            with part.open("rb") as source:
                shutil.copyfileobj(source, target)


def _by_problem(records: Iterable[SampleRecord]) -> Mapping[str, list[SampleRecord]]:
    groups: dict[str, list[SampleRecord]] = {}
    for record in records:
        groups.setdefault(record.uid, []).append(record)
    return groups


def _powers_of_two(num_samples: int) -> list[int]:
    return [2**i for i in range(num_samples.bit_length()) if num_samples > 1]

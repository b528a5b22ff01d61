"""What an evaluation writes: `samples.jsonl`, a line a response, and `results.json`, a row a suite and decoding.

`summary.md` says the same as `results.json` for a reader (`luffy.evaluation.summary`).
"""

import json
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from pathlib import Path

from pydantic import Field, ValidationError

from luffy.config.strict import StrictModel
from luffy.errors import LuffyError
from luffy.evaluation.statistics import Estimate, accuracy, by_label, guess_adjusted, majority_at_k, pass_at_k
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
    """As the model saw it, chat template applied; of a chat elsewhere its turns."""
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
    grader: str = ""
    """Kind of the grader, e.g. `math`."""
    second_grader: str | None = None
    """Kind of the other grader of mathematics, which judged the same response; None where there is none."""
    second_outcome: str | None = None
    subject: str | None = None
    """Of the problem, where its data says so."""
    level: str | None = None
    num_options: int | None = None
    """Of a multiple-choice question."""
    confidential: bool = False
    """The problem's authors ask that its text be shown nowhere."""


_NAMES = tuple(field.name for field in fields(SampleRecord))
_REQUIRED = frozenset(field.name for field in fields(SampleRecord) if field.default is MISSING)
_UNPARSED = (Outcome.NO_ANSWER, Outcome.UNPARSABLE)


class Breakdown(StrictModel):
    """The problems of one subject or level."""

    num_problems: int
    accuracy: float
    interval: tuple[float, float]


class Agreement(StrictModel):
    """Two graders on the same responses."""

    first: str
    second: str
    share: float
    """Responses that both call correct, or neither."""
    only_first: int
    """Responses that the first alone calls correct."""
    only_second: int
    second_accuracy: float


class Choices(StrictModel):
    """What a multiple-choice score has to be read with."""

    unparsed_share: float
    """Responses that name none of the options."""
    guess_adjusted: float | None
    """The score if each of those had guessed; not the accuracy. None where the number of options is not known."""
    chance: float | None
    """What guessing alone would give."""


class Protocol(StrictModel):
    """How the problems were asked."""

    template: str
    temperature: float
    top_p: float
    max_response_tokens: int
    stop: tuple[str, ...]
    """Those of the template included."""
    engine: str


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
    method: str = ""
    """Of the interval."""
    maj_at_k: dict[str, float] = Field(default_factory=dict)
    """For k = the number of samples; empty with one sample."""
    no_answer_share: float = 0.0
    """Responses without a final answer."""
    graders: tuple[str, ...] = ()
    """Kinds of the graders, that of most responses first."""
    agreement: Agreement | None = None
    """With the other grader, on a suite of mathematics."""
    choices: Choices | None = None
    """On a multiple-choice suite."""
    by_subject: dict[str, Breakdown] = Field(default_factory=dict)
    """Empty where not every problem names one."""
    by_level: dict[str, Breakdown] = Field(default_factory=dict)
    protocol: Protocol | None = None


class EvaluationResults(StrictModel):
    """All rows of one checkpoint."""

    checkpoint: str
    """`base`, `sft` or `rl`."""
    confidence: float
    """Level of the intervals."""
    rows: tuple[ResultRow, ...]


def result_row(records: Sequence[SampleRecord], confidence: float, protocol: Protocol | None = None) -> ResultRow:
    """The row of one suite and decoding; LuffyError unless every problem has the same number of responses."""
    counts, problems = correct_counts(records), _by_problem(records)
    sizes = {uid: len(group) for uid, group in problems.items()}
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
        method=estimate.method,
        maj_at_k=_majority(problems.values(), num_samples),
        no_answer_share=sum(record.outcome == Outcome.NO_ANSWER for record in records) / len(records),
        graders=tuple(grader for grader, _ in Counter(record.grader for record in records).most_common() if grader),
        agreement=_agreement(records),
        choices=_choices(list(problems.values()), correct, num_samples),
        by_subject=_breakdown([group[0].subject for group in problems.values()], correct, num_samples, confidence),
        by_level=_breakdown([group[0].level for group in problems.values()], correct, num_samples, confidence),
        protocol=protocol,
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
    with replacing(path) as file:
        file.writelines(map(record_line, records))


def record_line(record: SampleRecord) -> bytes:
    """The line of `record` in a file of samples."""
    values = {name: getattr(record, name) for name in _NAMES}
    return json.dumps(values, ensure_ascii=False).encode("utf-8", errors="replace") + b"\n"


def parse_record(line: str | bytes) -> SampleRecord:
    """The record of a line; ValueError (no JSON), KeyError or TypeError when `record_line` did not make it.

    A file of an earlier version has no value for fields that came later, which have defaults.
    """
    values = json.loads(line)
    return SampleRecord(**{name: values[name] for name in _NAMES if name in values or name in _REQUIRED})


def read_sample_records(path: Path) -> Iterator[SampleRecord]:
    """Yield the records of a file; KeyError or TypeError when it was not written by `write_sample_records`."""
    with path.open("rb") as file:
        yield from map(parse_record, file)


def join_sample_records(path: Path, parts: Iterable[Path]) -> None:
    """Write the records of `parts`, one file after the other, to `path`: all of them or nothing."""
    with replacing(path) as target:
        for part in parts:
            with part.open("rb") as source:
                shutil.copyfileobj(source, target)


def _majority(problems: Iterable[Sequence[SampleRecord]], num_samples: int) -> dict[str, float]:
    if num_samples == 1:
        return {}
    return {str(num_samples): majority_at_k([[(record.answer, record.correct) for record in p] for p in problems])}


def _agreement(records: Sequence[SampleRecord]) -> Agreement | None:
    """Of the responses that two graders have judged, where all of them have the same two."""
    pairs = {(record.grader, record.second_grader) for record in records}
    if len(pairs) != 1 or records[0].second_grader is None:
        return None
    verdicts = Counter((record.correct, record.second_outcome == Outcome.CORRECT) for record in records)
    only_first, only_second = verdicts[True, False], verdicts[False, True]
    return Agreement(
        first=records[0].grader,
        second=records[0].second_grader,
        share=1 - (only_first + only_second) / len(records),
        only_first=only_first,
        only_second=only_second,
        second_accuracy=(verdicts[True, True] + only_second) / len(records),
    )


def _choices(problems: Sequence[Sequence[SampleRecord]], correct: Sequence[int], num_samples: int) -> Choices | None:
    if any(record.grader != "choice" for problem in problems for record in problem):
        return None
    unparsed = [sum(record.outcome in _UNPARSED for record in problem) for problem in problems]
    options = [problem[0].num_options for problem in problems if problem[0].num_options]
    known = len(options) == len(problems)
    return Choices(
        unparsed_share=sum(unparsed) / (len(problems) * num_samples),
        guess_adjusted=guess_adjusted(correct, unparsed, options, num_samples) if known else None,
        chance=sum(1 / count for count in options) / len(problems) if known else None,
    )


def _breakdown(
    labels: Sequence[str | None], correct: Sequence[int], num_samples: int, confidence: float
) -> dict[str, Breakdown]:
    named = [label for label in labels if label is not None]
    if len(named) < len(labels):
        return {}
    estimates = by_label(named, correct, num_samples, confidence)
    return {label: _of_label(estimate) for label, estimate in estimates.items()}


def _of_label(estimate: Estimate) -> Breakdown:
    return Breakdown(num_problems=estimate.num_problems, accuracy=estimate.value, interval=estimate.interval)


def _by_problem(records: Iterable[SampleRecord]) -> Mapping[str, list[SampleRecord]]:
    groups: dict[str, list[SampleRecord]] = {}
    for record in records:
        groups.setdefault(record.uid, []).append(record)
    return groups


def _powers_of_two(num_samples: int) -> list[int]:
    return [2**i for i in range(num_samples.bit_length()) if num_samples > 1]

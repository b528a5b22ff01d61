"""Results of an evaluation: a row per suite and decoding, counted from the records of the responses.

The rows are `results.json`; `summary.md` shows them as tables (`luffy.report.evaluation_page`).
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

from pydantic import ConfigDict, Field, ValidationError

from luffy.config.strict import StrictModel
from luffy.errors import DataError, LuffyError
from luffy.evaluation.sample_files import SAMPLES_FILE, SampleRecord, find_samples, read_sample_records, read_samples_of
from luffy.files import write_atomic
from luffy.statistics.accuracy import Estimate, accuracy, by_label, guess_adjusted, majority_at_k, pass_at_k
from luffy.statistics.paired import BenchmarkComparisons, PairedAccuracies, compare
from luffy.tracking.advice import MOST, UNREAD, advice_on_responses
from luffy.types import TOKEN_LIMITS, Outcome

RESULTS_FILE = "results.json"
Cell = tuple[str, str]
"""Suite and decoding."""
_CHECKPOINT_NAMES = {"base": "base", "sft": "SFT", "rl": "RL"}

_UNPARSED = (Outcome.NO_ANSWER, Outcome.UNPARSABLE)
_CHOICE = "choice"
"""Kind of the grader of multiple choice."""


class Breakdown(StrictModel):
    """The problems of one subject or level."""

    num_problems: int
    accuracy: float
    interval: tuple[float, float]

    @property
    def estimate(self) -> Estimate:
        return Estimate(self.accuracy, *self.interval, "", self.num_problems)


class Choices(StrictModel):
    """Figures that put a multiple-choice score into perspective."""

    unparsed_share: float
    """Responses that name none of the options."""
    guess_adjusted: float | None
    """The score if each of those had been a guess; not the accuracy. None if the number of options is unknown."""
    chance: float | None
    """The accuracy of pure guessing."""


class SamplingProtocol(StrictModel):
    """How the responses were sampled."""

    template: str
    temperature: float
    top_p: float
    max_response_tokens: int
    stop: tuple[str, ...]
    """Stop texts, those of the template included."""
    engine: str


class ResultRow(StrictModel):
    """One checkpoint on one suite under one decoding."""

    model_config = ConfigDict(extra="ignore")  # files of earlier versions have fields that are no more

    suite: str
    decoding: str
    num_problems: int
    num_samples: int
    """Responses per problem."""
    accuracy: float
    """Mean over all responses (avg@k)."""
    interval: tuple[float, float]
    """Confidence interval over problems: for another set of problems of this kind (`luffy.statistics.accuracy`)."""
    outcomes: dict[str, int]
    """Number of responses by grading outcome; outcomes that never occurred are 0."""
    mean_tokens: float
    """Per response; 0: unknown, and with it how many were cut (`luffy.evaluation.regrading`)."""
    truncated_share: float
    """Responses that ran into a limit of tokens."""
    pass_at_k: dict[str, float] = Field(default_factory=dict)
    """For k = 1, 2, 4, ... and the number of samples; empty with one sample."""
    method: str = ""
    """Name of the interval's method."""
    maj_at_k: dict[str, float] = Field(default_factory=dict)
    """For k = the number of samples; empty with one sample."""
    no_answer_share: float = 0.0
    """Responses without a final answer."""
    graders: tuple[str, ...] = ()
    """Kinds of the graders, that of most responses first."""
    choices: Choices | None = None
    """Only on a multiple-choice suite."""
    by_subject: dict[str, Breakdown] = Field(default_factory=dict)
    """Empty where not every problem names one."""
    by_level: dict[str, Breakdown] = Field(default_factory=dict)
    protocol: SamplingProtocol | None = None

    @property
    def estimate(self) -> Estimate:
        return Estimate(self.accuracy, *self.interval, self.method, self.num_problems)

    @property
    def unread_share(self) -> float:
        """Responses without an answer that the grader can read."""
        return sum(self.outcomes.get(outcome, 0) for outcome in UNREAD) / sum(self.outcomes.values())


class EvaluationResults(StrictModel):
    """All rows of one checkpoint."""

    checkpoint: str
    """`base`, `sft` or `rl`."""
    confidence: float
    """Level of the intervals."""
    rows: tuple[ResultRow, ...]


def advice_on(rows: Sequence[ResultRow]) -> str | None:
    """Advice on suites in which most responses have no readable answer; None without such a suite."""
    silent = [row for row in rows if row.unread_share > MOST]
    if not silent:
        return None
    unread, truncated = fmean(row.unread_share for row in silent), fmean(row.truncated_share for row in silent)
    return advice_on_responses(
        ", ".join(row.suite for row in silent), unread, truncated, "evaluation.max_response_tokens"
    )


def checkpoint_name(checkpoint: str, names: Mapping[str, str] = _CHECKPOINT_NAMES) -> str:
    """Display name of `base`, `sft`, `rl` or `sft_2` (SFT 2) by those in `names`; others are unchanged."""
    stage, _, number = checkpoint.rpartition("_")
    if number.isdecimal() and stage in names:
        return f"{names[stage]} {number}"
    return names.get(checkpoint, checkpoint)


class Tally:
    """Counts the graded responses of one suite under one decoding as they arrive; keeps no text except the answers.

    `problems`: the counts of each problem, by uid.
    """

    def __init__(self, suite: str, decoding: str) -> None:
        self._cell = suite, decoding
        self.problems: dict[str, ProblemTally] = {}
        self._outcomes: Counter[str] = Counter()
        self._graders: Counter[str] = Counter()
        self._num_tokens = 0
        self._num_truncated = 0

    def add(self, record: SampleRecord) -> None:
        """Count one more response."""
        problem = self.problems.get(record.uid)
        if problem is None:
            labels = record.subject, record.level, record.num_options
            problem = self.problems[record.uid] = ProblemTally(*labels, record.ground_truth)
        problem.may_be_shown &= record.may_be_shown
        problem.votes.append((record.answer, record.correct))
        problem.num_unparsed += record.outcome in _UNPARSED
        self._outcomes[record.outcome] += 1
        self._graders[record.grader] += 1
        self._num_tokens += record.num_tokens
        self._num_truncated += record.finish_reason in TOKEN_LIMITS

    def row(self, confidence: float, protocol: SamplingProtocol | None = None) -> ResultRow:
        """The finished row; LuffyError unless every problem has the same number of responses."""
        problems, responses = list(self.problems.values()), self._outcomes.total()
        num_samples = max((len(problem.votes) for problem in problems), default=0)
        short = [uid for uid, problem in self.problems.items() if len(problem.votes) != num_samples]
        if not problems or short:
            raise LuffyError(f"{len(short)} problems have fewer than {num_samples} responses, e.g. {short[:1]}")
        tries = sorted({*(2**i for i in range(num_samples.bit_length())), num_samples}) if num_samples > 1 else []
        correct = [problem.num_correct for problem in problems]
        estimate = accuracy(correct, num_samples, confidence)
        return ResultRow(
            suite=self._cell[0],
            decoding=self._cell[1],
            num_problems=len(problems),
            num_samples=num_samples,
            accuracy=estimate.value,
            interval=estimate.interval,
            outcomes={outcome.value: self._outcomes[outcome] for outcome in Outcome},
            mean_tokens=self._num_tokens / responses,
            truncated_share=self._num_truncated / responses,
            pass_at_k={str(k): pass_at_k(correct, num_samples, k) for k in tries},
            method=estimate.method,
            maj_at_k={str(num_samples): majority_at_k([p.votes for p in problems])} if num_samples > 1 else {},
            no_answer_share=self._outcomes[Outcome.NO_ANSWER] / responses,
            graders=tuple(grader for grader, _ in self._graders.most_common() if grader),
            choices=_choices(problems, num_samples) if set(self._graders) == {_CHOICE} else None,
            by_subject=_breakdown([problem.subject for problem in problems], correct, num_samples, confidence),
            by_level=_breakdown([problem.level for problem in problems], correct, num_samples, confidence),
            protocol=protocol,
        )


@dataclass(slots=True)
class ProblemTally:
    """Counts of the responses to one problem, and the answers."""

    subject: str | None
    level: str | None
    num_options: int | None
    ground_truth: str
    may_be_shown: bool = True
    """Whether the reference and the answers may be."""
    votes: list[tuple[str | None, bool]] = field(default_factory=list)
    """Each response's answer, and whether it is correct."""
    num_unparsed: int = 0

    @property
    def num_correct(self) -> int:
        return sum(correct for _, correct in self.votes)

    @property
    def accuracy(self) -> float:
        return self.num_correct / len(self.votes)


def tally_cells(records: Iterable[SampleRecord]) -> dict[Cell, Tally]:
    """The records counted by suite and decoding, in the order in which these appear."""
    tallies: dict[Cell, Tally] = {}
    for record in records:
        cell = record.suite, record.decoding
        tallies.setdefault(cell, Tally(*cell)).add(record)
    return tallies


def write_results(path: Path, results: EvaluationResults) -> None:
    write_atomic(path, results.model_dump_json(indent=1) + "\n")


def write_counted(
    folder: Path,
    checkpoint: str,
    confidence: float,
    protocols: Mapping[Cell, SamplingProtocol],
    write_pages: Callable[[Path, EvaluationResults], None],
) -> EvaluationResults:
    """Count the samples in `folder`, and write the results and their pages beside them."""
    tallies = tally_cells(read_sample_records(folder / SAMPLES_FILE))
    rows = tuple(tally.row(confidence, protocols.get(cell)) for cell, tally in tallies.items())
    results = EvaluationResults(checkpoint=checkpoint, confidence=confidence, rows=rows)
    write_results(folder / RESULTS_FILE, results)
    write_pages(folder, results)
    return results


def read_results(path: Path) -> EvaluationResults:
    """What `write_results` wrote; LuffyError names the file when it is missing or something else."""
    try:
        return EvaluationResults.model_validate_json(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, ValidationError) as error:
        raise LuffyError(f"{path}: not the results of an evaluation ({str(error).splitlines()[0]})") from None


def _choices(problems: Sequence[ProblemTally], num_samples: int) -> Choices:
    unparsed = [problem.num_unparsed for problem in problems]
    correct = [problem.num_correct for problem in problems]
    options = [problem.num_options for problem in problems if problem.num_options]
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
    found = by_label(named, correct, num_samples, confidence) if len(named) == len(labels) else {}
    return {
        label: Breakdown(num_problems=of.num_problems, accuracy=of.value, interval=of.interval)
        for label, of in found.items()
    }


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
    references: Mapping[Cell, Mapping[str, str]] = field(default_factory=dict)
    """Reference answers by problem."""

    @property
    def checkpoint(self) -> str:
        return self.results.checkpoint

    def row(self, cell: Cell) -> ResultRow | None:
        """The result on a suite under a decoding, if it was evaluated."""
        return next((row for row in self.results.rows if (row.suite, row.decoding) == cell), None)

    def against(self, first: "CheckpointScores", suites: Iterable[str], decoding: str) -> BenchmarkComparisons:
        """How it compares with `first` on the same problems of every suite; LuffyError where they are not the same."""
        pairs = {}
        for cell in ((suite, decoding) for suite in suites):
            before, after, row = first.correct[cell], self.correct[cell], self.row(cell)
            if before.keys() != after.keys():
                names = f"{first.checkpoint} and {self.checkpoint}"
                raise LuffyError(f"{names} were evaluated on different problems of {cell}")
            assert row is not None
            k = row.num_samples
            shares, others = ([solved[uid] / k for uid in before] for solved in (before, after))
            pairs[cell[0]] = PairedAccuracies(shares, others, k)
        return compare(pairs, self.results.confidence)


def read_scores(directory: Path, names: Mapping[str, str] | None = None) -> CheckpointScores:
    """What a finished evaluation found, with its suites and decodings in the order of its responses.

    `names`: what to call some checkpoints otherwise.
    """
    cells = {cell: tally.problems for cell, tally in tally_cells(read_samples_of(directory)).items()}
    correct = {cell: {uid: each.num_correct for uid, each in problems.items()} for cell, problems in cells.items()}
    references = {cell: {uid: each.ground_truth for uid, each in problems.items()} for cell, problems in cells.items()}
    results = read_results(directory / RESULTS_FILE)
    name = (names or {}).get(results.checkpoint, results.checkpoint)
    return CheckpointScores(results.model_copy(update={"checkpoint": name}), correct, references)

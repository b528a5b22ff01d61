"""Comparison of two evaluations: paired tests, and the problems whose result changed."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from luffy.errors import DataError
from luffy.evaluation.finished import FinishedEvaluation
from luffy.evaluation.results import Cell
from luffy.evaluation.sample_records import SampleRecord
from luffy.statistics.paired import BenchmarkComparison, PairedAccuracies, compare


@dataclass(frozen=True, slots=True)
class ProblemAnswers:
    """One model's answers to a problem."""

    num_correct: int
    num_samples: int
    answers: tuple[tuple[str | None, int], ...]
    """Each answer with how often it was given, the most frequent first; None: no answer."""

    @property
    def share(self) -> float:
        return self.num_correct / self.num_samples


@dataclass(slots=True)
class _ProblemCounts:
    """Counts of one evaluation's responses to a problem."""

    subject: str | None
    ground_truth: str
    confidential: bool = False
    num_correct: int = 0
    num_samples: int = 0
    answers: Counter[str | None] = field(default_factory=Counter)

    def add(self, record: SampleRecord) -> None:
        self.confidential |= not record.may_be_shown
        self.num_correct += record.correct
        self.num_samples += 1
        self.answers[record.answer] += 1

    @property
    def result(self) -> ProblemAnswers:
        return ProblemAnswers(self.num_correct, self.num_samples, tuple(self.answers.most_common()))


@dataclass(frozen=True, slots=True)
class ChangedProblem:
    """A problem that the two models solve at different rates."""

    uid: str
    subject: str | None
    confidential: bool
    """Neither its reference nor any answer may be shown."""
    ground_truth: str
    first: ProblemAnswers
    second: ProblemAnswers


@dataclass(frozen=True, slots=True)
class CellChanges:
    """One suite under one decoding."""

    cell: Cell
    accuracies: tuple[float, float]
    """Accuracies on the problems that both evaluations have."""
    comparison: BenchmarkComparison
    changed: tuple[ChangedProblem, ...]
    """First the problems that the second evaluation solves more often, then the others; each by size of the change."""
    only_first: int
    """Problems that the other evaluation does not have; they are not compared."""
    only_second: int
    other_reference: int
    """Problems whose reference answer differs between the two evaluations."""


@dataclass(frozen=True, slots=True)
class Changes:
    """The second evaluation against the first."""

    cells: tuple[CellChanges, ...]
    left_out: tuple[Cell, ...]
    """Cells that only one of the two evaluations has."""


def find_changes(first: FinishedEvaluation, second: FinishedEvaluation) -> Changes:
    """Compare the problems that both evaluations have; p-values are Holm-corrected over all cells.

    The confidence level is that of the first. Raises DataError where they share no problem of a suite and decoding.
    """
    before, after = _tally_problems(first.records()), _tally_problems(second.records())
    shared = {cell: [uid for uid in before[cell] if uid in after[cell]] for cell in before if cell in after}
    shared = {cell: uids for cell, uids in shared.items() if uids}
    if not shared:
        raise DataError(
            f"{first.directory} and {second.directory} share no problem: the first has {_names(before)}, the second "
            f"{_names(after)} (suite, decoding)"
        )
    pairs = {
        _title(cell): PairedAccuracies(
            [before[cell][uid].result.share for uid in uids],
            [after[cell][uid].result.share for uid in uids],
            min(min(before[cell][uid].num_samples, after[cell][uid].num_samples) for uid in uids),
        )
        for cell, uids in shared.items()
    }
    comparison = compare(pairs, first.results.confidence)
    cells = tuple(
        _changes(cell, uids, before[cell], after[cell], comparison.on(_title(cell))) for cell, uids in shared.items()
    )
    apart = dict.fromkeys([*before, *after])
    return Changes(cells, tuple(cell for cell in apart if cell not in shared))


def _changes(
    cell: Cell,
    uids: Sequence[str],
    before: Mapping[str, _ProblemCounts],
    after: Mapping[str, _ProblemCounts],
    comparison: BenchmarkComparison,
) -> CellChanges:
    problems = [_problem(uid, before[uid], after[uid]) for uid in uids]
    changed = [problem for problem in problems if problem.first.share != problem.second.share]
    return CellChanges(
        cell,
        (fmean(problem.first.share for problem in problems), fmean(problem.second.share for problem in problems)),
        comparison,
        tuple(sorted(changed, key=_order)),
        len(before) - len(uids),
        len(after) - len(uids),
        sum(before[uid].ground_truth != after[uid].ground_truth for uid in uids),
    )


def _problem(uid: str, before: _ProblemCounts, after: _ProblemCounts) -> ChangedProblem:
    # Either evaluation may be the older one; only its records hold this.
    confidential = before.confidential or after.confidential
    return ChangedProblem(uid, before.subject, confidential, before.ground_truth, before.result, after.result)


def _order(problem: ChangedProblem) -> tuple[bool, float]:
    change = problem.second.share - problem.first.share
    return change < 0, -abs(change)


def _tally_problems(records: Iterable[SampleRecord]) -> dict[Cell, dict[str, _ProblemCounts]]:
    """Counts for each problem, by suite and decoding; the records are read once and not kept."""
    found: dict[Cell, dict[str, _ProblemCounts]] = {}
    for record in records:
        problems = found.setdefault((record.suite, record.decoding), {})
        if record.uid not in problems:
            problems[record.uid] = _ProblemCounts(record.subject, record.ground_truth)
        problems[record.uid].add(record)
    return found


def _title(cell: Cell) -> str:
    return f"{cell[0]}, {cell[1]}"


def _names(cells: Mapping[Cell, object]) -> str:
    return "; ".join(map(_title, cells))

"""Two evaluations beside each other: the paired comparison, and the problems whose result changed."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from luffy.errors import DataError
from luffy.evaluation.comparison import BenchmarkComparison, PairedAccuracies, compare
from luffy.evaluation.finished import Cell, FinishedEvaluation
from luffy.evaluation.results import SampleRecord


@dataclass(frozen=True, slots=True)
class Said:
    """What one model said to a problem."""

    num_correct: int
    num_samples: int
    answers: tuple[tuple[str | None, int], ...]
    """Each answer with how often it was given, the most frequent first; None: no answer."""

    @property
    def share(self) -> float:
        return self.num_correct / self.num_samples


@dataclass(frozen=True, slots=True)
class ChangedProblem:
    """A problem that the two models solve to different shares."""

    uid: str
    subject: str | None
    confidential: bool
    """Neither its reference nor what was answered may be shown."""
    ground_truth: str
    first: Said
    second: Said


@dataclass(frozen=True, slots=True)
class CellChanges:
    """One suite under one decoding."""

    cell: Cell
    accuracies: tuple[float, float]
    """On the problems that both have."""
    comparison: BenchmarkComparison
    changed: tuple[ChangedProblem, ...]
    """Those that the second solves more often come first, the largest change first in both halves."""
    only_first: int
    """Problems that the other evaluation does not have; they are not compared."""
    only_second: int
    other_reference: int
    """Problems whose reference answer is another one in the second evaluation."""


@dataclass(frozen=True, slots=True)
class Changes:
    """The second evaluation against the first."""

    cells: tuple[CellChanges, ...]
    left_out: tuple[Cell, ...]
    """In one of the two alone."""


def find_changes(first: FinishedEvaluation, second: FinishedEvaluation) -> Changes:
    """Compare problem by problem what both evaluations have; p-values are Holm's over all of it.

    The confidence is that of the first. Raises DataError where they share no problem of a suite and decoding.
    """
    before, after = ({cell: _by_problem(rows) for cell, rows in one.records.items()} for one in (first, second))
    shared = {cell: [uid for uid in before[cell] if uid in after[cell]] for cell in before if cell in after}
    shared = {cell: uids for cell, uids in shared.items() if uids}
    if not shared:
        raise DataError(
            f"{first.directory} and {second.directory} share no problem: the first has {_names(before)}, the second "
            f"{_names(after)} (suite, decoding)"
        )
    pairs = {
        _title(cell): PairedAccuracies(
            [_said(before[cell][uid]).share for uid in uids],
            [_said(after[cell][uid]).share for uid in uids],
            min(min(len(before[cell][uid]), len(after[cell][uid])) for uid in uids),
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
    before: Mapping[str, Sequence[SampleRecord]],
    after: Mapping[str, Sequence[SampleRecord]],
    comparison: BenchmarkComparison,
) -> CellChanges:
    problems = [_problem(before[uid], after[uid]) for uid in uids]
    changed = [problem for problem in problems if problem.first.share != problem.second.share]
    return CellChanges(
        cell,
        (fmean(problem.first.share for problem in problems), fmean(problem.second.share for problem in problems)),
        comparison,
        tuple(sorted(changed, key=_order)),
        len(before) - len(uids),
        len(after) - len(uids),
        sum(before[uid][0].ground_truth != after[uid][0].ground_truth for uid in uids),
    )


def _problem(before: Sequence[SampleRecord], after: Sequence[SampleRecord]) -> ChangedProblem:
    # The name of the suite and its records say it, whichever of the two evaluations is the older.
    confidential = any(
        record.confidential or "gpqa" in record.suite.lower() for records in (before, after) for record in records
    )
    return ChangedProblem(
        before[0].uid, before[0].subject, confidential, before[0].ground_truth, _said(before), _said(after)
    )


def _order(problem: ChangedProblem) -> tuple[bool, float]:
    change = problem.second.share - problem.first.share
    return change < 0, -abs(change)


def _said(records: Sequence[SampleRecord]) -> Said:
    answers = Counter(record.answer for record in records)
    return Said(sum(record.correct for record in records), len(records), tuple(answers.most_common()))


def _by_problem(records: Sequence[SampleRecord]) -> dict[str, list[SampleRecord]]:
    found: dict[str, list[SampleRecord]] = {}
    for record in records:
        found.setdefault(record.uid, []).append(record)
    return found


def _title(cell: Cell) -> str:
    return f"{cell[0]}, {cell[1]}"


def _names(cells: Mapping[Cell, object]) -> str:
    return "; ".join(map(_title, cells))

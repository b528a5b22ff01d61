"""Comparison of two evaluations: paired tests, and the problems whose result changed."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import fmean

from luffy.errors import DataError
from luffy.evaluation.results import Cell, FinishedEvaluation
from luffy.evaluation.sample_files import SampleRecord
from luffy.statistics.paired import BenchmarkComparison, PairedAccuracies, compare


@dataclass(slots=True)
class ProblemAnswers:
    """One evaluation's responses to a problem."""

    subject: str | None
    ground_truth: str
    confidential: bool = False
    num_correct: int = 0
    num_samples: int = 0
    counts: Counter[str | None] = field(default_factory=Counter)
    """How often each answer was given; None: no answer."""

    @property
    def share(self) -> float:
        return self.num_correct / self.num_samples


@dataclass(frozen=True, slots=True)
class ChangedProblem:
    """A problem that the two models solve at different rates."""

    uid: str
    first: ProblemAnswers
    second: ProblemAnswers

    @property
    def confidential(self) -> bool:
        """Whether neither its reference nor any answer may be shown; the older evaluation may not have marked it."""
        return self.first.confidential or self.second.confidential

    @property
    def gain(self) -> float:
        return self.second.share - self.first.share


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
        had, has = ("; ".join(map(", ".join, cells)) for cells in (before, after))
        raise DataError(
            f"{first.directory} and {second.directory} share no problem: the first has {had}, the second {has} (suite, "
            "decoding)"
        )
    pairs = {
        ", ".join(cell): PairedAccuracies(
            [before[cell][uid].share for uid in uids],
            [after[cell][uid].share for uid in uids],
            min(min(before[cell][uid].num_samples, after[cell][uid].num_samples) for uid in uids),
        )
        for cell, uids in shared.items()
    }
    comparison, cells = compare(pairs, first.results.confidence), list[CellChanges]()
    for cell, uids in shared.items():
        old, new = before[cell], after[cell]
        problems = [ChangedProblem(uid, old[uid], new[uid]) for uid in uids]
        changed = [problem for problem in problems if problem.gain]
        cells.append(
            CellChanges(
                cell,
                (fmean(each.first.share for each in problems), fmean(each.second.share for each in problems)),
                comparison.on(", ".join(cell)),
                tuple(sorted(changed, key=lambda problem: (problem.gain < 0, -abs(problem.gain)))),
                len(old) - len(uids),
                len(new) - len(uids),
                sum(old[uid].ground_truth != new[uid].ground_truth for uid in uids),
            )
        )
    apart = dict.fromkeys([*before, *after])
    return Changes(tuple(cells), tuple(cell for cell in apart if cell not in shared))


def _tally_problems(records: Iterable[SampleRecord]) -> dict[Cell, dict[str, ProblemAnswers]]:
    """Counts for each problem, by suite and decoding; the records are read once and not kept."""
    found: dict[Cell, dict[str, ProblemAnswers]] = {}
    for record in records:
        problems = found.setdefault((record.suite, record.decoding), {})
        if record.uid not in problems:
            problems[record.uid] = ProblemAnswers(record.subject, record.ground_truth)
        problem = problems[record.uid]
        problem.confidential |= not record.may_be_shown
        problem.num_correct += record.correct
        problem.num_samples += 1
        problem.counts[record.answer] += 1
    return found

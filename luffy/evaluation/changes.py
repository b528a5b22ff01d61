"""Comparison of two evaluations: paired tests, and the problems whose result changed."""

from dataclasses import dataclass
from statistics import fmean

from luffy.errors import DataError
from luffy.evaluation.results import Cell, FinishedEvaluation, ProblemTally, tally_cells
from luffy.statistics.paired import BenchmarkComparison, PairedAccuracies, compare


@dataclass(frozen=True, slots=True)
class SharedProblem:
    """A problem that both evaluations have."""

    uid: str
    first: ProblemTally
    second: ProblemTally

    @property
    def may_be_shown(self) -> bool:
        """Whether its reference and the answers may be; the older evaluation may not have marked it."""
        return self.first.may_be_shown and self.second.may_be_shown

    @property
    def gain(self) -> float:
        """What the second evaluation's accuracy on it has more."""
        return self.second.accuracy - self.first.accuracy


@dataclass(frozen=True, slots=True)
class CellChanges:
    """One suite under one decoding."""

    cell: Cell
    accuracies: tuple[float, float]
    """Accuracies on the problems that both evaluations have."""
    comparison: BenchmarkComparison
    changed: tuple[SharedProblem, ...]
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
    before, after = (
        {cell: tally.problems for cell, tally in tally_cells(each.records()).items()} for each in (first, second)
    )
    shared = {
        cell: [SharedProblem(uid, old, after[cell][uid]) for uid, old in problems.items() if uid in after[cell]]
        for cell, problems in before.items()
        if cell in after
    }
    shared = {cell: problems for cell, problems in shared.items() if problems}
    if not shared:
        had, has = ("; ".join(map(", ".join, cells)) for cells in (before, after))
        raise DataError(
            f"{first.directory} and {second.directory} share no problem: the first has {had}, the second {has} (suite, "
            "decoding)"
        )
    pairs = {
        ", ".join(cell): PairedAccuracies(
            [each.first.accuracy for each in problems],
            [each.second.accuracy for each in problems],
            min(len(side.votes) for each in problems for side in (each.first, each.second)),
        )
        for cell, problems in shared.items()
    }
    comparison, cells = compare(pairs, first.results.confidence), list[CellChanges]()
    for cell, problems in shared.items():
        pair, changed = pairs[", ".join(cell)], [each for each in problems if each.gain]
        cells.append(
            CellChanges(
                cell,
                (fmean(pair.first), fmean(pair.second)),
                comparison.on(", ".join(cell)),
                tuple(sorted(changed, key=lambda each: (each.gain < 0, -abs(each.gain)))),
                len(before[cell]) - len(problems),
                len(after[cell]) - len(problems),
                sum(each.first.ground_truth != each.second.ground_truth for each in problems),
            )
        )
    return Changes(tuple(cells), tuple(cell for cell in dict.fromkeys([*before, *after]) if cell not in shared))

"""Accuracies with their intervals, as cells of tables."""

from luffy.evaluation.method_comparison.seed_scores import Score
from luffy.report import wording
from luffy.report.tables import TableCell
from luffy.statistics.accuracy import Estimate


def score_cell(score: Score) -> TableCell:
    """An accuracy in percent, with its interval and that of each seed where there are several."""
    cell = estimate_cell(score.estimate)
    if len(score.by_seed) == 1:
        return cell
    seeds = ", ".join(wording.percent(value) for value in score.by_seed.values())
    return TableCell(cell.text, (*cell.details, f"({seeds})"))


def estimate_cell(estimate: Estimate) -> TableCell:
    """In percent, with the interval."""
    return TableCell(wording.percent(estimate.value), (wording.interval(*estimate.interval),))

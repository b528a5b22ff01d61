"""Intervals for accuracies and for their differences, pass@k, maj@k, and the score adjusted for guessing.

The unit is the problem: intervals are about new problems of the same kind, so several responses to one problem are a
cluster, not independent trials. None of the intervals collapses at an accuracy of 0 or 1.

Legend: `n` problems, `k` samples per problem, `c` correct ones among them.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from luffy.grading.equivalence.certain import canonical_number, normalise
from luffy.statistics.intervals import (
    FEW_PROBLEMS,
    Interval,
    clustered_wilson,
    normal_quantile,
    verdict_interval,
)

_PSEUDO_PROBLEMS = 2.0
"""Number of the problems imagined by Bonett and Price (`paired_difference`)."""
_CORRECT = object()
"""In place of all correct answers of a problem, however they are written."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A number with its interval; `low <= value <= high`."""

    value: float
    low: float
    high: float
    method: str
    """Name of the interval's method in tables."""
    num_problems: int

    @property
    def interval(self) -> tuple[float, float]:
        return self.low, self.high


@dataclass(frozen=True, slots=True)
class PairedDifference:
    """How two checkpoints compare on the same problems."""

    difference: Estimate
    """Mean accuracy of the second minus that of the first."""
    p_value: float
    """Two-sided, of no difference; it is below 1 - confidence just where the interval excludes 0."""
    wins: int
    """Problems on which the second is right more often."""
    ties: int
    losses: int

    @property
    def is_clear(self) -> bool:
        """Whether the interval excludes 0."""
        return self.difference.low > 0 or self.difference.high < 0


def accuracy(correct: Sequence[int], num_samples: int, confidence: float) -> Estimate:
    """Accuracy over n problems, `correct[i]` of `num_samples` responses being right, with its interval.

    `verdict_interval` for one verdict per problem, and for responses that always agree, which amount to the same.
    Otherwise `clustered_wilson`. Neither can account for a kind of problem that the set happens to lack: where 3 % of
    problems are nearly always solved and the rest nearly never, 30 problems at 32 samples give an interval that covers
    the truth 58 % of the time (docs/results.md publishes the coverage). Raises ValueError for no problem, or for a
    count outside 0..num_samples.
    """
    _check_counts(correct, num_samples)
    mean = sum(correct) / (len(correct) * num_samples)
    interval = _interval(correct, num_samples, confidence)
    return Estimate(mean, min(interval.low, mean), max(interval.high, mean), interval.method, len(correct))


def by_label(labels: Sequence[str], correct: Sequence[int], num_samples: int, confidence: float) -> dict[str, Estimate]:
    """`accuracy` of the problems of each label (a subject, a level), labels sorted.

    `labels[i]` and `correct[i]` speak of problem i. Raises ValueError when their lengths differ, and as `accuracy`.
    """
    if len(labels) != len(correct):
        raise ValueError(f"one label a problem: there are {len(labels)} labels of {len(correct)} problems")
    groups: dict[str, list[int]] = {label: [] for label in sorted(set(labels))}
    for label, count in zip(labels, correct, strict=True):
        groups[label].append(count)
    return {label: accuracy(counts, num_samples, confidence) for label, counts in groups.items()}


def paired_difference(
    first: Sequence[float], second: Sequence[float], confidence: float, num_samples: int = 1
) -> PairedDifference:
    """Compare two checkpoints by their per-problem accuracies (in [0, 1], same problems, same order).

    The closed form of D. G. Bonett and R. M. Price, J. Educ. Behav. Stat. 37 (2012), for few problems
    (`luffy.statistics.paired` for any): a normal interval after adding two imagined problems, one won and one lost.
    With one sample a problem that is their interval for paired proportions. With `num_samples` the imagined problems
    are won and lost by 1 / sqrt(num_samples), about what chance makes of a problem's accuracy; by 1 the interval would
    be several times too wide. Raises ValueError when the lengths differ or are 0.
    """
    difference_P = paired_differences(first, second)
    n = len(difference_P) + _PSEUDO_PROBLEMS
    centre = float(difference_P.sum()) / n
    variance = (float((difference_P**2).sum()) + _PSEUDO_PROBLEMS / num_samples) / n - centre**2
    error = math.sqrt(variance / n)
    half = normal_quantile(confidence) * error
    value = float(difference_P.mean())
    low, high = max(-1.0, min(value, centre - half)), min(1.0, max(value, centre + half))
    estimate = Estimate(value, low, high, "Bonett-Price", len(difference_P))
    return paired_result(difference_P, estimate, math.erfc(abs(centre) / error / math.sqrt(2)))


def paired_differences(first: Sequence[float], second: Sequence[float]) -> NDArray[np.float64]:
    """Second minus first, one number per problem; ValueError when the lengths differ or are 0."""
    if len(first) != len(second) or not first:
        raise ValueError(f"need the same problems on both sides, got {len(first)} and {len(second)}")
    return np.asarray(second, dtype=np.float64) - np.asarray(first, dtype=np.float64)


def paired_result(difference_P: NDArray[np.float64], estimate: Estimate, p_value: float) -> PairedDifference:
    """Put wins, ties and losses beside an estimate of the mean of `difference_P`."""
    wins, losses = int((difference_P > 0).sum()), int((difference_P < 0).sum())
    return PairedDifference(estimate, p_value, wins, len(difference_P) - wins - losses, losses)


def pass_at_k(correct: Sequence[int], num_samples: int, k: int) -> float:
    """Probability that one of `k` responses to a problem is right, mean over problems, without bias.

    1 - C(n - c, k) / C(n, k) a problem (M. Chen et al., "Evaluating large language models trained on code", 2021,
    eq. 1, whose n is `num_samples` here). Raises ValueError when `k` is above `num_samples`.
    """
    _check_counts(correct, num_samples)
    if not 1 <= k <= num_samples:
        raise ValueError(f"pass@{k} needs at least {k} samples a problem, there are {num_samples}")
    ways = math.comb(num_samples, k)
    return sum(1 - math.comb(num_samples - c, k) / ways for c in correct) / len(correct)


def majority_at_k(votes: Sequence[Sequence[tuple[str | None, bool]]]) -> float:
    """maj@k: the share of problems whose most frequent answer is correct.

    `votes[i]` holds (extracted answer, graded correct) of each of problem i's k responses. Answers are the same when
    their normalised texts or plain numbers are equal, or when both were graded correct; one that was ever graded
    correct is correct. Responses without an answer vote only if there is no other, and are wrong then. A tie among
    the most frequent answers counts the share of them that is correct. X. Wang et al., "Self-consistency" (2023).
    Raises ValueError for no problem, or for one without responses.
    """
    if not votes or not all(votes):
        raise ValueError("maj@k needs at least one problem, and at least one response to each")
    return sum(map(_majority, votes)) / len(votes)


def guess_adjusted(
    num_correct: Sequence[int], num_unparsed: Sequence[int], num_options: Sequence[int], num_samples: int
) -> float:
    """Accuracy on multiple-choice items if every unparsed response were replaced by a random guess, in expectation.

    Item i has `num_options[i]` options and `num_samples` responses, of which `num_correct[i]` are right and
    `num_unparsed[i]` name no option; each of those counts 1 / options. Not to be called accuracy: on weak models it is
    0.3 to 1.9 points above it. Raises ValueError for no item, lengths that differ, or impossible counts.
    """
    _check_counts(num_correct, num_samples)
    if not len(num_correct) == len(num_unparsed) == len(num_options):
        raise ValueError(f"lengths differ: {len(num_correct)} items, {len(num_unparsed)} unparsed, {len(num_options)}")
    items = list(zip(num_correct, num_unparsed, num_options, strict=True))
    for right, unparsed, options in items:
        if unparsed < 0 or right + unparsed > num_samples or options < 1:
            raise ValueError(f"{right} correct and {unparsed} unparsed of {num_samples}, {options} options: impossible")
    return sum(right + unparsed / options for right, unparsed, options in items) / (len(items) * num_samples)


def _majority(votes: Sequence[tuple[str | None, bool]]) -> float:
    """The share of one problem's most frequent answers that is correct."""
    right = {_answer_key(answer) for answer, is_correct in votes if is_correct and answer is not None}
    counts: Counter[object] = Counter()
    for answer, is_correct in votes:
        key = None if answer is None else _answer_key(answer)
        if is_correct or key in right:
            counts[_CORRECT] += 1
        elif key is not None:
            counts[key] += 1
    most = max(counts.values(), default=0)
    winners = [key for key, count in counts.items() if count == most]
    return winners.count(_CORRECT) / len(winners) if winners else 0.0


def _answer_key(answer: str) -> str | tuple[str, str, str]:
    """A key that is equal for answers that certainly mean the same."""
    text = normalise(answer)
    return canonical_number(text) or text


def _interval(correct: Sequence[int], num_samples: int, confidence: float) -> Interval:
    if set(correct) <= {0, num_samples}:
        return verdict_interval(sum(correct) // num_samples, len(correct), confidence)
    low_R, high_R = clustered_wilson(np.asarray([correct], dtype=np.float64) / num_samples, num_samples, confidence)
    few = ", few problems" if len(correct) < FEW_PROBLEMS else ""
    return Interval(float(low_R[0]), float(high_R[0]), f"Wilson, clustered{few}")


def _check_counts(correct: Sequence[int], num_samples: int) -> None:
    if not correct:
        raise ValueError("no problems: an accuracy over nothing does not exist")
    if not all(0 <= count <= num_samples for count in correct):
        raise ValueError(f"each problem has 0 to {num_samples} correct samples, found {min(correct)}..{max(correct)}")

"""Accuracies and differences over several seeds, or base policies, and the problems that all of them share.

Seeds and problems are crossed: each seed's policy answers every problem, and both another seed and another set of
problems would give another number. Their variances add up. With the three or five seeds that a comparison has, a
bootstrap that resamples seeds is too narrow (it takes 2/3 of the variance of three), so seeds get Student's t. Where
each seed starts from a base of its own, `seed` means base, and what seeds and bases add is not told apart.
`tests/campaigns/base_coverage.py` measures how often these intervals hold the truth.

Legend: `S` seeds, `P` problems.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from luffy.statistics.accuracy import Estimate, accuracy
from luffy.statistics.intervals import student_p, student_quantile

Array = NDArray[np.float64]
_ENOUGH = 5
"""From so many seeds on, what chance leaves in single differences is told from what seeds add (`seeded_difference`)."""
_IMAGINED = 2.0
"""Problems that Bonett and Price add, one won and one lost."""


@dataclass(frozen=True, slots=True)
class SeededDifference:
    """How an arm compares with the reference, on the same problems with the same seeds."""

    difference: Estimate
    """Mean accuracy of the arm minus that of the reference."""
    p_value: float
    """Two-sided, of no difference; it is below 1 - confidence just where the interval excludes 0."""
    num_seeds: int
    by_seed: tuple[float, ...]
    """The difference with each seed."""


def seeded_accuracy(correct: Sequence[Sequence[int]], num_samples: int, confidence: float) -> Estimate:
    """Accuracy over S seeds and P problems: `correct[s][p]` of `num_samples` responses are right.

    Two intervals, one over problems for the mean over seeds (`accuracy`, all responses to a problem being its cluster),
    one over seeds by Student's t with S - 1 degrees of freedom, and their distances from the mean added in squares: G.
    Y. Zou and A. Donner, "Construction of confidence limits about effect measures", Stat. Med. 27 (2008). So it
    collapses neither at 0 nor at 1. With one seed it covers only problems. Raises ValueError for no seed, or seeds with
    different numbers of problems.
    """
    correct_SP = _matrix(correct)
    num_seeds = len(correct_SP)
    problems = accuracy([int(count) for count in correct_SP.sum(axis=0)], num_samples * num_seeds, confidence)
    if num_seeds == 1:
        return problems
    mean_S = correct_SP.mean(axis=1) / num_samples
    reach = student_quantile(confidence, num_seeds - 1) * math.sqrt(float(mean_S.var(ddof=1)) / num_seeds)
    low = problems.value - math.hypot(problems.value - problems.low, reach)
    high = problems.value + math.hypot(problems.high - problems.value, reach)
    method = f"{problems.method} over problems, t over {num_seeds} seeds"
    return Estimate(problems.value, max(low, 0.0), min(high, 1.0), method, problems.num_problems)


def seeded_difference(
    first: Sequence[Sequence[float]], second: Sequence[Sequence[float]], num_samples: int, confidence: float
) -> SeededDifference:
    """How `second` does against `first`: accuracies in [0, 1] by seed and problem, same seeds, same problems, in order.

    The mean of all S x P differences, with the variance of its means by seed over S plus that of its means by problem
    over P, and Student's t with the degrees of freedom of F. E. Satterthwaite, Biometrics Bull. 2 (1946). The sum
    counts what is left in single differences twice; from five seeds on it is taken away once, as in an analysis of
    variance of two crossed random effects, each of which is not below 0. With fewer, twice holds the truth more often.
    The variance over problems is that of D. G. Bonett and R. M. Price (as in `paired_difference`), which is not 0 where
    nothing changed. With one seed it is over problems alone, and says nothing of another seed. Raises ValueError where
    shapes differ.
    """
    first_SP, second_SP = _matrix(first), _matrix(second)
    if first_SP.shape != second_SP.shape:
        raise ValueError(f"need the same seeds and problems on both sides, got {first_SP.shape} and {second_SP.shape}")
    difference_SP = second_SP - first_SP
    num_seeds, num_problems = difference_SP.shape
    mean_S, mean_P = difference_SP.mean(axis=1), difference_SP.mean(axis=0)
    value = float(difference_SP.mean())
    of_problems = _variance_over_problems(mean_P, num_samples * num_seeds)
    of_seeds = float(mean_S.var(ddof=1)) / num_seeds if num_seeds > 1 else 0.0
    left_freedom = (num_seeds - 1) * (num_problems - 1)
    of_chance = 0.0
    if num_seeds >= _ENOUGH and num_problems > 1:
        left_SP = difference_SP - mean_S[:, None] - mean_P + value
        of_chance = float((left_SP**2).sum()) / left_freedom / difference_SP.size
    parts = [(num_problems + _IMAGINED - 1, of_problems), (num_seeds - 1, of_seeds)]
    above = [(freedom, variance) for freedom, variance in parts if variance > of_chance]
    variance = of_chance + sum(each - of_chance for _, each in above)
    error = math.sqrt(variance)
    freedom = _freedom(variance, [*above, (left_freedom, of_chance)])
    half = student_quantile(confidence, freedom) * error
    method = f"t over problems and {num_seeds} seeds" if num_seeds > 1 else "t over problems"
    estimate = Estimate(value, max(value - half, -1.0), min(value + half, 1.0), method, num_problems)
    by_seed = tuple(float(mean) for mean in mean_S)
    return SeededDifference(estimate, student_p(value / error, freedom), num_seeds, by_seed)


def seed_interval(values: Sequence[float], confidence: float) -> tuple[float, float]:
    """Bounds of the mean of shares over several seeds, by Student's t within [0, 1]; ValueError for one seed."""
    if len(values) < 2:
        raise ValueError("need at least two seeds")
    value_S = np.asarray(values, dtype=np.float64)
    reach = student_quantile(confidence, len(values) - 1) * math.sqrt(float(value_S.var(ddof=1)) / len(values))
    mean = float(value_S.mean())
    return max(mean - reach, 0.0), min(mean + reach, 1.0)


def _matrix(rows: Sequence[Sequence[float]]) -> Array:
    if not rows or len({len(row) for row in rows}) != 1 or not len(rows[0]):
        raise ValueError(f"need the same problems with each seed, got {[len(row) for row in rows]}")
    return np.asarray(rows, dtype=np.float64)


def _variance_over_problems(mean_P: Array, num_responses: int) -> float:
    """Variance of the mean of `mean_P`, each of which averages `num_responses` responses per side."""
    n = len(mean_P) + _IMAGINED
    centre = float(mean_P.sum()) / n
    return ((float((mean_P**2).sum()) + _IMAGINED / num_responses) / n - centre**2) / n


def _freedom(total: float, parts: Sequence[tuple[float, float]]) -> float:
    """Satterthwaite's degrees of freedom of a sum or difference of variances, each after its own."""
    return total**2 / sum(variance**2 / freedom for freedom, variance in parts if variance > 0)

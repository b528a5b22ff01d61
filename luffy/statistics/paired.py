"""Comparisons of two models on the same problems, over one benchmark or several.

Legend: `P` problems, `V` different values among their differences, `D` bootstrap resamples.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from luffy.statistics.accuracy import (
    Estimate,
    PairedDifference,
    paired_difference,
    paired_differences,
    paired_result,
)

BOOTSTRAP_DRAWS = 10_000
MIN_CHANGED = 30.0
"""A difference that rests on fewer problems (`supporting_problems`) is not left to the bootstrap."""
_SEED = 20250421
_SAME = 1e-8
"""Differences that are nearer to one another are equal but for rounding."""


@dataclass(frozen=True, slots=True)
class PairedAccuracies:
    """Two models on the problems of one benchmark: accuracies in [0, 1], same problems, same order."""

    first: Sequence[float]
    second: Sequence[float]
    num_samples: int
    """Responses per problem, of the model with fewer."""


@dataclass(frozen=True, slots=True)
class BenchmarkComparison:
    """One benchmark among several."""

    benchmark: str
    paired: PairedDifference
    adjusted_p: float
    """The p-value after Holm's correction over all benchmarks of the comparison."""
    is_significant: bool
    """Whether `adjusted_p` is below 1 - confidence."""


@dataclass(frozen=True, slots=True)
class BenchmarkComparisons:
    """A second model against a first over several benchmarks."""

    confidence: float
    """Level of each single interval; 1 - confidence bounds the chance of any wrong claim of significance."""
    benchmarks: tuple[BenchmarkComparison, ...]

    def on(self, benchmark: str) -> BenchmarkComparison:
        """The comparison on one benchmark; KeyError when it is not among them."""
        for row in self.benchmarks:
            if row.benchmark == benchmark:
                return row
        raise KeyError(benchmark)


def compare(pairs: Mapping[str, PairedAccuracies], confidence: float) -> BenchmarkComparisons:
    """Compare two models on each benchmark, with Holm's correction over them. Raises ValueError as `compare_paired`."""
    paired = [compare_paired(pair.first, pair.second, pair.num_samples, confidence) for pair in pairs.values()]
    adjusted = holm([result.p_value for result in paired])
    rows = zip(pairs, paired, adjusted, strict=True)
    return BenchmarkComparisons(
        confidence, tuple(BenchmarkComparison(name, result, p, p < 1 - confidence) for name, result, p in rows)
    )


def compare_paired(
    first: Sequence[float], second: Sequence[float], num_samples: int, confidence: float
) -> PairedDifference:
    """How `second` does against `first`, by per-problem accuracies over `num_samples` responses.

    The percentile bootstrap over problems, 10,000 resamples with a fixed seed, where the difference rests on 30
    problems or more (`supporting_problems`). With fewer it holds the truth as rarely as 44 % of the time at 30
    problems, and the closed form `paired_difference` is taken. BCa does worse still:
    `tests/campaigns/interval_coverage.py`. Raises ValueError when the lengths differ or are 0.
    """
    difference_P = paired_differences(first, second)
    if supporting_problems(difference_P) < MIN_CHANGED:
        return paired_difference(first, second, confidence, num_samples)
    mean_D = np.sort(bootstrap_means(difference_P))
    value = float(difference_P.mean())
    # The ends are the resamples at which the p-value passes 1 - confidence.
    cut = max(int((1 - confidence) / 2 * (BOOTSTRAP_DRAWS + 1)) - 1, 0)
    low, high = float(mean_D[cut]), float(mean_D[-1 - cut])
    estimate = Estimate(value, min(low, value), max(high, value), "paired bootstrap", len(difference_P))
    return paired_result(difference_P, estimate, _two_sided_p(mean_D))


def supporting_problems(difference_P: NDArray[np.float64]) -> float:
    """`changed_problems`; where most problems change alike, those that change otherwise, if they are fewer.

    Resamples of 50 problems that were all won are all the same, and their interval would have no width.
    """
    value_V, count_V = np.unique(difference_P.round(9), return_counts=True)
    most = int(count_V.argmax())
    usual = float(value_V[most]) if 2 * count_V[most] > len(difference_P) else 0.0
    other_P = np.where(np.abs(difference_P - usual) < _SAME, 0.0, difference_P - usual)
    return min(changed_problems(difference_P), changed_problems(other_P))


def changed_problems(difference_P: NDArray[np.float64]) -> float:
    """On how many problems a difference rests: (sum of d^2)^2 / (sum of d^4), with 0 for none.

    With one sample a problem these are the wins and losses; with more, a few large changes among many small ones count
    as few.
    """
    squared_P = difference_P**2
    fourth = float((squared_P**2).sum())
    return float(squared_P.sum()) ** 2 / fourth if fourth > 0 else 0.0


def bootstrap_means(difference_P: NDArray[np.float64]) -> NDArray[np.float64]:
    """Means of 10,000 resamples of the problems, the same at every call.

    How often each different value is drawn is multinomial, which is the same as drawing problem by problem and far
    less work.
    """
    value_V, count_V = np.unique(difference_P.round(9), return_counts=True)
    n = len(difference_P)
    drawn_DV = np.random.default_rng(_SEED).multinomial(n, count_V / n, size=BOOTSTRAP_DRAWS)
    # Rounded: a mean of 0 must not become 1e-17, which would be above 0.
    return (drawn_DV @ value_V / n).round(12)


def holm(p_values: Sequence[float]) -> list[float]:
    """P-values adjusted for their number, in the order given.

    S. Holm, "A simple sequentially rejective multiple test procedure", Scand. J. Stat. 6 (1979): the i-th smallest of m
    times m - i + 1, at least the one before it, at most 1. Claims made below a level are all right with at least 1
    minus that probability. Raises ValueError for a value outside [0, 1].
    """
    if not all(0 <= p <= 1 for p in p_values):
        raise ValueError(f"p-values lie in [0, 1], found {min(p_values)}..{max(p_values)}")
    order = sorted(range(len(p_values)), key=p_values.__getitem__)
    adjusted = [0.0] * len(p_values)
    largest = 0.0
    for rank, index in enumerate(order):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = largest
    return adjusted


def _two_sided_p(mean_D: NDArray[np.float64]) -> float:
    """Bootstrap p-value of no difference; the data count as one more resample, so it is never 0."""
    tail = min(int((mean_D <= 0).sum()), int((mean_D >= 0).sum()))
    return min(1.0, 2 * (tail + 1) / (len(mean_D) + 1))

"""How often do the intervals over bases and problems hold the truth?

Run: nice -n 19 python tests/campaigns/base_coverage.py > tests/campaigns/base_coverage.csv   [--repetitions 1000]

Two arms start from each of B bases and answer the same P problems once. The log-odds of a right answer are a level,
plus what the base adds to both arms, plus what the problem adds (standard deviation 1), plus for the second arm the
effect, which differs from base to base by one of `SHAPES`. The truth is the mean over all bases and problems. Prints a
row for each cell, in percent: how often `seeded_difference` and `seeded_accuracy` (of the second arm) hold it, how wide
the former is, and how often a hierarchical percentile bootstrap (bases, then problems) does. 1,000 simulated studies a
cell have a standard error of 0.7 points, the 300 of the bootstrap one of 1.3.
"""

import argparse
import csv
import sys
from collections.abc import Callable, Mapping

import numpy as np
from scipy.special import expit

from luffy.statistics.over_seeds import seeded_accuracy, seeded_difference

CONFIDENCE = 0.95
BASES = 3, 5, 6, 8
PROBLEMS = 256
LEVELS = {"low, no effect": (-1.0, 0.0), "low, large effect": (-1.0, 2.0), "high, some effect": (1.5, 1.0)}
BOOTSTRAPPED = 300
_MANY = 100_000

Generator = np.random.Generator
Array = np.ndarray
Shape = Callable[[Generator, int], tuple[Array, Array]]


def _kinds(share: float) -> Shape:
    """A share of the bases gains much, the others nothing."""

    def draw(rng: Generator, size: int) -> tuple[Array, Array]:
        noise = 0.3 * rng.standard_normal((2, size))
        return noise[0], noise[1] + np.where(rng.random(size) < share, 4.0, 0.0)

    return draw


SHAPES: Mapping[str, Shape] = {
    "alike": lambda rng, size: (np.zeros(size), np.zeros(size)),
    "normal": lambda rng, size: (0.5 * rng.standard_normal(size), 0.5 * rng.standard_normal(size)),
    "wide": lambda rng, size: (1.5 * rng.standard_normal(size), 1.5 * rng.standard_normal(size)),
    "skewed": lambda rng, size: (0.5 * rng.standard_normal(size), rng.exponential(1.0, size)),
    "half of the bases gain": _kinds(0.5),
    "a fifth of the bases gain": _kinds(0.2),
}
"""What a base adds to both arms, and to the effect."""


def bootstrap(difference_BP: Array, rng: Generator, draws: int = 400) -> tuple[float, float]:
    bases, problems = difference_BP.shape
    base_DB, weight_DP = (
        rng.multinomial(size, np.full(size, 1 / size), size=draws) / size for size in (bases, problems)
    )
    low, high = np.quantile(((base_DB @ difference_BP) * weight_DP).sum(axis=1), [0.025, 0.975])
    return float(low), float(high)


def cell(shape: str, level: str, bases: int, repetitions: int, rng: Generator) -> list[str]:
    """The row of one cell."""
    # One problem for each base: the mean over all pairs is the same.
    (base, gain), (both, effect) = LEVELS[level], SHAPES[shape](rng, _MANY)
    start = base + both + rng.standard_normal(_MANY)
    first, second = (float(expit(each).mean()) for each in (start, start + gain + effect))
    held, width = np.zeros(3), 0.0
    for number in range(repetitions):
        problem_P, (both_B, effect_B) = rng.standard_normal(PROBLEMS), SHAPES[shape](rng, bases)
        start_BP = base + both_B[:, None] + problem_P
        chance_ABP = expit(np.stack([start_BP, start_BP + gain + effect_B[:, None]]))
        right_ABP = (rng.random(chance_ABP.shape) < chance_ABP).astype(int)
        found = seeded_difference(*right_ABP.tolist(), 1, CONFIDENCE).difference
        held[0] += found.low <= second - first <= found.high
        width += found.high - found.low
        alone = seeded_accuracy(right_ABP[1].tolist(), 1, CONFIDENCE)
        held[1] += alone.low <= second <= alone.high
        if number < BOOTSTRAPPED:
            low, high = bootstrap(right_ABP[1] - right_ABP[0], rng)
            held[2] += low <= second - first <= high
    difference, accuracy, resampled = 100 * held / [repetitions, repetitions, min(repetitions, BOOTSTRAPPED)]
    found = difference, 100 * width / repetitions, accuracy, resampled
    return [shape, level, str(bases), *(f"{each:.1f}" for each in found)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=1000)
    repetitions = parser.parse_args().repetitions
    rows = csv.writer(sys.stdout, lineterminator="\n")
    rows.writerow(["shape", "level", "bases", "difference", "width", "accuracy", "bootstrap"])
    for shape in SHAPES:
        for level in LEVELS:
            for bases in BASES:
                rng = np.random.default_rng([len(shape), len(level), bases])
                rows.writerow(cell(shape, level, bases, repetitions, rng))
                sys.stdout.flush()


if __name__ == "__main__":
    main()

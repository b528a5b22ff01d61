"""How often do the intervals of an accuracy, and of a difference, hold the truth?

Run: nice -n 19 python tests/campaigns/interval_coverage.py --csv tests/campaigns/interval_coverage.csv
     [--repetitions 4000] [--problems 30 50 100 200 500]

The truth is the accuracy over all problems of a kind, of which a set of n is drawn. Problems differ by a distribution
of their chance of being solved (`SHAPES`), all of the same mean. With one response a problem only the mean matters and
the coverage is computed, not simulated. With 32 every cell is 4,000 simulated sets (standard error 0.3 points); a
quarter of them for differences (0.7 points). Bootstraps draw 1,000 times here, the same resamples for all sets of a
size. Prints Markdown: the lowest and highest coverage over accuracies of .05 to .95 and how many of them lie outside 93
to 97 %, then every such cell; the same for paired differences, of which only those below 93 % are listed. `--csv` keeps
all cells.
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
from scipy.stats import binom

from luffy.statistics.accuracy import paired_difference
from luffy.statistics.intervals import clustered_wilson, verdict_interval
from luffy.statistics.paired import MIN_CHANGED, supporting_problems

CONFIDENCE = 0.95
LOWEST, HIGHEST = 0.93, 0.97
ACCURACIES = tuple(round(0.05 * step, 2) for step in range(1, 20))
NUM_SAMPLES = 32
OTHERS = 4
"""Of how many simulated sets one serves for differences, whose bootstraps take most of the time."""
_DRAWS = 1000
_TAIL = (1 - CONFIDENCE) / 2
_ENDS = np.array([_TAIL, 1 - _TAIL])

Array = np.ndarray
Bounds = tuple[Array, Array]
Draw = Callable[[np.random.Generator, float, tuple[int, int]], Array]


class Cell(NamedTuple):
    """Coverage in one place of the grid."""

    what: str
    problems: int
    samples: int
    shape: str
    accuracy: float
    gain: float
    coverage: float
    width: float


def beta(correlation: float) -> Draw:
    """Chances are Beta distributed; `correlation` is that of two responses to one problem."""
    total = 1 / correlation - 1
    return lambda rng, mean, shape: rng.beta(mean * total, (1 - mean) * total, shape)


def two_kinds(low: float, high: float) -> Draw:
    """Problems of two kinds, mirrored for means above a half."""

    def draw(rng: np.random.Generator, mean: float, shape: tuple[int, int]) -> Array:
        if mean > 0.5:
            return 1 - draw(rng, 1 - mean, shape)
        return np.where(rng.random(shape) < (mean - low) / (high - low), high, low)

    return draw


SHAPES: dict[str, Draw] = {
    "alike": lambda rng, mean, shape: np.full(shape, mean),  # all problems are equally hard
    "beta .05": beta(0.05),
    "beta .2": beta(0.2),
    "beta .5": beta(0.5),
    "beta .8": beta(0.8),
    "0 or .9": two_kinds(0.0, 0.9),
    ".03 or .6": two_kinds(0.03, 0.6),
    ".02 or .98": two_kinds(0.02, 0.98),
}


def one_sample(num_problems: int) -> Iterator[Cell]:
    """Exact coverage with one verdict a problem."""
    counts = range(num_problems + 1)
    ends = [(i.low, i.high) for i in (verdict_interval(c, num_problems, CONFIDENCE) for c in counts)]
    for accuracy in ACCURACIES:
        chance_C = binom.pmf(counts, num_problems, accuracy)
        held_C = np.array([low <= accuracy <= high for low, high in ends])
        width = sum(c * (high - low) for c, (low, high) in zip(chance_C, ends, strict=True))
        yield Cell("accuracy", num_problems, 1, "any", accuracy, 0.0, float(chance_C @ held_C), width)


def many_samples(num_problems: int, repetitions: int) -> Iterator[Cell]:
    """Simulated coverage with 32 responses a problem."""
    for position, (shape, draw) in enumerate(SHAPES.items()):
        for accuracy in ACCURACIES:
            rng = np.random.default_rng([num_problems, position, round(100 * accuracy)])
            share_RP = rng.binomial(NUM_SAMPLES, draw(rng, accuracy, (repetitions, num_problems))) / NUM_SAMPLES
            low_R, high_R = clustered_wilson(share_RP, NUM_SAMPLES, CONFIDENCE)
            # What `accuracy` does where the responses to every problem agree.
            for row in np.flatnonzero(((share_RP == 0) | (share_RP == 1)).all(axis=1)):
                interval = verdict_interval(round(share_RP[row].sum()), num_problems, CONFIDENCE)
                low_R[row], high_R[row] = interval.low, interval.high
            held, width = ((low_R <= accuracy) & (accuracy <= high_R)).mean(), (high_R - low_R).mean()
            yield Cell("accuracy", num_problems, NUM_SAMPLES, shape, accuracy, 0.0, held, width)


def shifted(correlation: float, rng: np.random.Generator, mean: float, gain: float, shape: tuple[int, int]) -> Bounds:
    """The second model solves a share of what the first does not, the same share everywhere."""
    first = beta(correlation)(rng, mean, shape)
    return first, first + gain * (1 - first) / (1 - mean)


def some_changed(rng: np.random.Generator, mean: float, gain: float, shape: tuple[int, int]) -> Bounds:
    """The models differ on one problem in five, and there by anything."""
    first, other = beta(0.5)(rng, mean, shape), beta(0.5)(rng, mean + 5 * gain, shape)
    return first, np.where(rng.random(shape) < 0.2, other, first)


PAIRS: dict[str, Callable[[np.random.Generator, float, float, tuple[int, int]], Bounds]] = {
    "alike": lambda rng, mean, gain, shape: (np.full(shape, mean), np.full(shape, mean + gain)),
    "beta .2": partial(shifted, 0.2),
    "beta .8": partial(shifted, 0.8),
    "one in five": some_changed,
}


def differences(num_problems: int, num_samples: int, repetitions: int) -> Iterator[Cell]:
    """Simulated coverage of paired differences."""
    for position, (shape, draw) in enumerate(PAIRS.items()):
        for accuracy in (0.05, 0.2, 0.5, 0.8):
            for gain in (0.0, 0.01, 0.03):
                rng = np.random.default_rng([num_problems, num_samples, position, round(1000 * (accuracy + gain))])
                first, second = draw(rng, accuracy, gain, (repetitions, num_problems))
                drawn = (rng.binomial(num_samples, second) - rng.binomial(num_samples, first)) / num_samples
                low_R, high_R = _paired(drawn, num_samples)
                held, width = ((low_R <= gain + 1e-6) & (gain - 1e-6 <= high_R)).mean(), (high_R - low_R).mean()
                yield Cell("difference", num_problems, num_samples, shape, accuracy, gain, held, width)


def _paired(difference_RP: Array, num_samples: int) -> Bounds:
    """The percentile bootstrap over problems where enough of them changed, else the closed form."""
    n, zeros = difference_RP.shape[1], [0.0] * difference_RP.shape[1]
    closed = [
        paired_difference(zeros, row, CONFIDENCE, num_samples).difference.interval for row in difference_RP.tolist()
    ]
    drawn_RD = np.sort(difference_RP.astype(np.float32) @ _resamples(n), axis=1).astype(np.float64)
    bootstrap = drawn_RD[:, np.rint(_ENDS * (_DRAWS - 1)).astype(int)].T
    bootstrapped_R = np.array([supporting_problems(row) >= MIN_CHANGED for row in difference_RP])
    low_R, high_R = np.where(bootstrapped_R, bootstrap, np.array(closed).T)
    return low_R, high_R


@cache
def _resamples(num_problems: int) -> Array:
    """How often each problem is drawn, a share, by draw."""
    rng = np.random.default_rng(num_problems)
    drawn = rng.multinomial(num_problems, np.full(num_problems, 1 / num_problems), _DRAWS)
    return (drawn / num_problems).astype(np.float32).T


def summary(cells: pd.DataFrame) -> str:
    """A Markdown table: a row a number of problems, a column a shape."""
    grid = cells.groupby(["problems", "shape"], sort=False).apply(_range).unstack(sort=False)
    lines = [f"| problems | {' | '.join(grid.columns)} |", "|---" * (1 + len(grid.columns)) + "|"]
    return "\n".join([*lines, *(f"| {n} | {' | '.join(texts)} |" for n, *texts in grid.itertuples())])


def _range(cells: pd.DataFrame) -> str:
    found, num_outside = 100 * cells["coverage"], sum(~cells["coverage"].between(LOWEST, HIGHEST))
    return f"{found.min():.1f} to {found.max():.1f}" + (f" ({num_outside})" if num_outside else "")


def outside(cells: pd.DataFrame) -> str:
    """Where the interval of an accuracy is beyond 93 to 97 %, and that of a difference below 93 %."""
    is_above = (cells["what"] == "accuracy") & (cells["coverage"] > HIGHEST)
    return "\n".join(
        f"- {cell.what}, {cell.problems} problems x {cell.samples}, {cell.shape}, accuracy {cell.accuracy:g}"
        + (f", gain {cell.gain:g}" if cell.what == "difference" else "")
        + f": {100 * cell.coverage:.1f} %"
        for cell in cells[is_above | (cells["coverage"] < LOWEST)].itertuples()
    )


def main() -> None:
    """Fill the grid, print it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problems", nargs="+", type=int, default=[30, 50, 100, 200, 500])
    parser.add_argument("--repetitions", type=int, default=4000)
    parser.add_argument("--csv", type=Path)
    options = parser.parse_args()
    found: list[Cell] = []
    for problems in options.problems:
        found += one_sample(problems)
        found += many_samples(problems, options.repetitions)
        for samples in (1, NUM_SAMPLES):
            found += differences(problems, samples, options.repetitions // OTHERS)
        print(f"{problems} problems: done", file=sys.stderr, flush=True)
    cells = pd.DataFrame(found)
    for (what, samples), own in cells.groupby(["what", "samples"], sort=False):
        print(f"\n{what}, {samples} a problem\n\n{summary(own)}")
    print(f"\noutside\n\n{outside(cells)}")
    if options.csv:
        digits = {name: cells[name].map("{:.4f}".format) for name in ("coverage", "width")}
        table = cells.assign(**digits).rename(columns={"width": "mean width"})
        table.to_csv(options.csv, index=False, lineterminator="\n")


if __name__ == "__main__":
    main()

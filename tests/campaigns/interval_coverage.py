"""How often do the intervals of an accuracy, and of a difference, hold the truth?

Run: nice -n 19 python tests/campaigns/interval_coverage.py --csv tests/campaigns/interval_coverage.csv
     [--repetitions 4000] [--problems 30 50 100 200 500] [--exact-only]

The truth is the accuracy over all problems of a kind, of which a set of n is drawn. Problems differ by a distribution
of their chance of being solved (`SHAPES`), all of the same mean. With one response a problem only the mean matters and
the coverage is computed, not simulated. With 32 every cell is 4,000 simulated sets (standard error 0.3 points); a
quarter of them for t and the bootstraps, and for differences (0.7 points). Bootstraps draw 1,000 times here, the same
resamples for all sets of a size. Prints Markdown: per method the lowest and highest coverage over accuracies of .05 to
.95 and how many of them lie outside 93 to 97 %, then every such cell of the shipped method; the same for paired
differences, of which only those below 93 % are listed. `--csv` keeps all cells of the shipped methods.
"""

import argparse
import csv
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import numpy as np
from scipy.stats import beta as beta_distribution
from scipy.stats import binom, norm
from scipy.stats import t as student

from luffy.statistics.accuracy import paired_difference
from luffy.statistics.intervals import clustered_wilson, verdict_interval, wilson_interval
from luffy.statistics.paired import MIN_CHANGED, supporting_problems

CONFIDENCE = 0.95
LOWEST, HIGHEST = 0.93, 0.97
ACCURACIES = tuple(round(0.05 * step, 2) for step in range(1, 20))
NUM_SAMPLES = 32
SHIPPED = "shipped"
OTHERS = 4
"""Of how many simulated sets one serves for the bootstraps, which take most of the time, and for differences."""
_DRAWS = 1000
_TAIL = (1 - CONFIDENCE) / 2
_ENDS = np.array([_TAIL, 1 - _TAIL])

Array = np.ndarray
Bounds = tuple[Array, Array]
Draw = Callable[[np.random.Generator, float, tuple[int, int]], Array]


@dataclass(frozen=True)
class Cell:
    """Coverage of one method in one place of the grid."""

    what: str
    problems: int
    samples: int
    shape: str
    accuracy: float
    gain: float
    method: str
    coverage: float
    width: float

    @property
    def is_outside(self) -> bool:
        return not LOWEST <= self.coverage <= HIGHEST


def alike(rng: np.random.Generator, mean: float, shape: tuple[int, int]) -> Array:
    """All problems are equally hard."""
    return np.full(shape, mean)


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
    "alike": alike,
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
    intervals = {
        SHIPPED: [(i.low, i.high) for i in (verdict_interval(c, num_problems, CONFIDENCE) for c in counts)],
        "Wilson": [wilson_interval(c / num_problems, num_problems, CONFIDENCE) for c in counts],
        "Jeffreys": [_jeffreys(c, num_problems) for c in counts],
        # With endless draws: quantiles of the binomial at the share seen.
        "percentile bootstrap": [binom.ppf(_ENDS, num_problems, c / num_problems) / num_problems for c in counts],
    }
    for accuracy in ACCURACIES:
        chance_C = binom.pmf(counts, num_problems, accuracy)
        held = {method: np.array([low <= accuracy <= high for low, high in ends]) for method, ends in intervals.items()}
        up_to_C = np.cumsum(chance_C)
        from_C = 1 - up_to_C + chance_C
        held["Clopper-Pearson"] = np.minimum(up_to_C, from_C) > _TAIL
        held["Clopper-Pearson mid-p"] = np.minimum(up_to_C, from_C) - chance_C / 2 > _TAIL
        for method, held_C in held.items():
            ends = intervals.get(method)
            width = sum(c * (high - low) for c, (low, high) in zip(chance_C, ends, strict=True)) if ends else math.nan
            yield Cell("accuracy", num_problems, 1, "any", accuracy, 0.0, method, float(chance_C @ held_C), width)


def many_samples(num_problems: int, repetitions: int) -> Iterator[Cell]:
    """Simulated coverage with 32 responses a problem."""
    for position, (shape, draw) in enumerate(SHAPES.items()):
        for accuracy in ACCURACIES:
            rng = np.random.default_rng([num_problems, position, round(100 * accuracy)])
            share_RP = rng.binomial(NUM_SAMPLES, draw(rng, accuracy, (repetitions, num_problems))) / NUM_SAMPLES
            for method, (low_R, high_R) in _clustered_methods(share_RP).items():
                coverage = float(((low_R <= accuracy) & (accuracy <= high_R)).mean())
                width = float((high_R - low_R).mean())
                yield Cell(
                    "accuracy", num_problems, NUM_SAMPLES, shape, accuracy, 0.0, method, coverage, width
                )  # fmt: skip


def _clustered_methods(share_RP: Array) -> dict[str, Bounds]:
    low_R, high_R = clustered_wilson(share_RP, NUM_SAMPLES, CONFIDENCE)
    # What `accuracy` does where the responses to every problem agree.
    for row in np.flatnonzero(((share_RP == 0) | (share_RP == 1)).all(axis=1)):
        n = share_RP.shape[1]
        interval = verdict_interval(round(share_RP[row].sum()), n, CONFIDENCE)
        low_R[row], high_R[row] = interval.low, interval.high
    few_RP = share_RP[: len(share_RP) // OTHERS]
    return {SHIPPED: (low_R, high_R)} | _textbook(few_RP)


def _textbook(value_RP: Array) -> dict[str, Bounds]:
    """Student's t, percentile and BCa bootstrap of a mean (B. Efron and R. Tibshirani, 1993, chapters 13 and 14)."""
    n = value_RP.shape[1]
    mean_R = value_RP.mean(axis=1)
    half_R = student.ppf(1 - _TAIL, n - 1) * value_RP.std(axis=1, ddof=1) / math.sqrt(n)
    drawn_RD = np.sort(value_RP.astype(np.float32) @ _resamples(n), axis=1).astype(np.float64)
    low_R, high_R = (_at(drawn_RD, np.full(len(mean_R), level)) for level in _ENDS)
    return {
        "t": (mean_R - half_R, mean_R + half_R),
        "percentile bootstrap": (low_R, high_R),
        "BCa bootstrap": _bca(value_RP, mean_R, drawn_RD),
    }


def _bca(value_RP: Array, mean_R: Array, drawn_RD: Array) -> Bounds:
    below_RD = (drawn_RD < mean_R[:, None] - 1e-6).mean(axis=1) + (drawn_RD < mean_R[:, None] + 1e-6).mean(axis=1)
    bias_R = norm.ppf(np.clip(below_RD / 2, 1e-5, 1 - 1e-5))
    deviation_RP = value_RP - mean_R[:, None]
    squares_R = (deviation_RP**2).sum(axis=1)
    skew_R = (deviation_RP**3).sum(axis=1) / np.where(squares_R > 0, 6 * squares_R**1.5, 1.0)
    shifted = (bias_R + quantile for quantile in norm.ppf(_ENDS))
    low_R, high_R = (_at(drawn_RD, norm.cdf(bias_R + s_R / (1 - skew_R * s_R))) for s_R in shifted)
    return low_R, high_R


@cache
def _resamples(num_problems: int) -> Array:
    """How often each problem is drawn, a share, by draw."""
    rng = np.random.default_rng(num_problems)
    drawn = rng.multinomial(num_problems, np.full(num_problems, 1 / num_problems), _DRAWS)
    return (drawn / num_problems).astype(np.float32).T


def _at(sorted_RD: Array, level_R: Array) -> Array:
    index_R = np.clip(np.rint(level_R * (_DRAWS - 1)).astype(int), 0, _DRAWS - 1)
    return np.take_along_axis(sorted_RD, index_R[:, None], axis=1)[:, 0]


def _jeffreys(correct: int, num_trials: int) -> tuple[float, float]:
    """Quantiles of Beta(c + 1/2, n - c + 1/2)."""
    low, high = beta_distribution.ppf(_ENDS, correct + 0.5, num_trials - correct + 0.5)
    return (0.0 if correct == 0 else float(low)), (1.0 if correct == num_trials else float(high))


def both_alike(rng: np.random.Generator, mean: float, gain: float, shape: tuple[int, int]) -> Bounds:
    return np.full(shape, mean), np.full(shape, mean + gain)


def shifted(correlation: float, rng: np.random.Generator, mean: float, gain: float, shape: tuple[int, int]) -> Bounds:
    """The second model solves a share of what the first does not, the same share everywhere."""
    first = beta(correlation)(rng, mean, shape)
    return first, first + gain * (1 - first) / (1 - mean)


def some_changed(rng: np.random.Generator, mean: float, gain: float, shape: tuple[int, int]) -> Bounds:
    """The models differ on one problem in five, and there by anything."""
    first, other = beta(0.5)(rng, mean, shape), beta(0.5)(rng, mean + 5 * gain, shape)
    return first, np.where(rng.random(shape) < 0.2, other, first)


PAIRS: dict[str, Callable[[np.random.Generator, float, float, tuple[int, int]], Bounds]] = {
    "alike": both_alike,
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
                for method, (low_R, high_R) in _paired_methods(drawn, num_samples).items():
                    coverage = float(((low_R <= gain + 1e-6) & (gain - 1e-6 <= high_R)).mean())
                    width = float((high_R - low_R).mean())
                    yield Cell(
                        "difference", num_problems, num_samples, shape, accuracy, gain, method, coverage, width
                    )  # fmt: skip


def _paired_methods(difference_RP: Array, num_samples: int) -> dict[str, Bounds]:
    textbook = _textbook(difference_RP)
    closed = _closed_form(difference_RP, num_samples)
    bootstrapped_R = np.array([supporting_problems(row) >= MIN_CHANGED for row in difference_RP])
    shipped = tuple(
        np.where(bootstrapped_R, *ends) for ends in zip(textbook["percentile bootstrap"], closed, strict=True)
    )
    return {SHIPPED: (shipped[0], shipped[1]), "closed form": closed} | textbook


def _closed_form(difference_RP: Array, num_samples: int) -> Bounds:
    zeros = [0.0] * difference_RP.shape[1]
    ends = [
        paired_difference(zeros, row, CONFIDENCE, num_samples).difference.interval for row in difference_RP.tolist()
    ]
    low_R, high_R = np.array(ends).T
    return low_R, high_R


def summary(cells: Sequence[Cell], what: str, samples: int) -> str:
    """A Markdown table: a row a method and size, a column a shape."""
    rows = [cell for cell in cells if (cell.what, cell.samples) == (what, samples)]
    shapes = list(dict.fromkeys(cell.shape for cell in rows))
    lines = [f"| interval | problems | {' | '.join(shapes)} |", "|---" * (2 + len(shapes)) + "|"]
    for method in dict.fromkeys(cell.method for cell in rows):
        for problems in dict.fromkeys(cell.problems for cell in rows):
            own = [cell for cell in rows if (cell.method, cell.problems) == (method, problems)]
            texts = [_range([cell for cell in own if cell.shape == shape]) for shape in shapes]
            lines.append(f"| {method} | {problems} | {' | '.join(texts)} |")
    return "\n".join(lines)


def outside(cells: Iterable[Cell]) -> str:
    """Where the shipped interval of an accuracy is beyond 93 to 97 %, and that of a difference below 93 %."""
    return "\n".join(
        f"- {cell.what}, {cell.problems} problems x {cell.samples}, {cell.shape}, accuracy {cell.accuracy:g}"
        + (f", gain {cell.gain:g}" if cell.what == "difference" else "")
        + f": {100 * cell.coverage:.1f} %"
        for cell in cells
        if cell.method == SHIPPED and cell.is_outside and (cell.what == "accuracy" or cell.coverage < LOWEST)
    )


def _range(cells: Sequence[Cell]) -> str:
    found = [100 * cell.coverage for cell in cells]
    num_outside = sum(cell.is_outside for cell in cells)
    return f"{min(found):.1f} to {max(found):.1f}" + (f" ({num_outside})" if num_outside else "")


def write_csv(path: Path, cells: Iterable[Cell]) -> None:
    """The cells of the shipped methods, a line each."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("what", "problems", "samples", "shape", "accuracy", "gain", "coverage", "mean width"))
        for cell in cells:
            if cell.method == SHIPPED:
                place = (cell.what, cell.problems, cell.samples, cell.shape, cell.accuracy, cell.gain)
                writer.writerow((*place, f"{cell.coverage:.4f}", f"{cell.width:.4f}"))


def main() -> None:
    """Fill the grid, print it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problems", nargs="+", type=int, default=[30, 50, 100, 200, 500])
    parser.add_argument("--repetitions", type=int, default=4000)
    parser.add_argument("--exact-only", action="store_true", help="one response a problem, nothing simulated")
    parser.add_argument("--csv", type=Path)
    options = parser.parse_args()
    cells: list[Cell] = []
    for problems in options.problems:
        cells += one_sample(problems)
        if options.exact_only:
            continue
        cells += many_samples(problems, options.repetitions)
        for samples in (1, NUM_SAMPLES):
            cells += differences(problems, samples, options.repetitions // OTHERS)
        print(f"{problems} problems: done", file=sys.stderr, flush=True)
    for what, samples in dict.fromkeys((cell.what, cell.samples) for cell in cells):
        print(f"\n{what}, {samples} a problem\n\n{summary(cells, what, samples)}")
    print(f"\nshipped, outside\n\n{outside(cells)}")
    if options.csv:
        write_csv(options.csv, cells)


if __name__ == "__main__":
    main()

"""Intervals for accuracies and for their differences, and pass@k.

The unit is the problem: intervals speak of new problems of the same kind, so several responses to one problem are a
cluster, not so many independent trials. None of the intervals collapses at an accuracy of 0 or 1.

Legend: `n` problems, `k` samples a problem, `c` correct ones among them.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

_PSEUDO_PROBLEMS = 2.0
"""Weight, in problems, of the assumption that a problem's samples agree (`effective_samples`), and number of the
problems imagined by Bonett and Price (`paired_difference`)."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A number with its interval; `low <= value <= high`."""

    value: float
    low: float
    high: float

    @property
    def interval(self) -> tuple[float, float]:
        return self.low, self.high


@dataclass(frozen=True, slots=True)
class PairedDifference:
    """How two checkpoints compare on the same problems."""

    difference: Estimate
    """Mean accuracy of the second minus that of the first."""
    wins: int
    """Problems on which the second is right more often."""
    ties: int
    losses: int

    @property
    def is_clear(self) -> bool:
        """Whether the interval excludes 0."""
        return self.difference.low > 0 or self.difference.high < 0


def wilson_interval(share: float, num_trials: float, confidence: float) -> tuple[float, float]:
    """Wilson's score interval for a share seen in `num_trials` trials (which need not be a whole number).

    E. B. Wilson, "Probable inference, the law of succession, and statistical inference", JASA 22 (1927).
    """
    z = _normal_quantile(confidence)
    denominator = 1 + z * z / num_trials
    centre = (share + z * z / (2 * num_trials)) / denominator
    half = z / denominator * math.sqrt(share * (1 - share) / num_trials + (z / (2 * num_trials)) ** 2)
    # At a share of 0 or 1 one end is exact; rounding may put it a hair beside.
    return max(0.0, min(share, centre - half)), min(1.0, max(share, centre + half))


def accuracy(correct: Sequence[int], num_samples: int, confidence: float) -> Estimate:
    """Accuracy over n problems, `correct[i]` of `num_samples` responses being right, with its interval.

    With one sample this is Wilson's interval. With more it is Wilson's with the effective sample size of the clustered
    design in place of the number of trials: L. Kish, "Survey Sampling" (1965) for the design effect; J. N. K. Rao and
    A. J. Scott, Biometrics 48 (1992), and C. Franco et al., J. Surv. Stat. Methodol. 7 (2019) for its use in
    binomial intervals. Raises ValueError for no problem, or for a count outside 0..num_samples.
    """
    _check_counts(correct, num_samples)
    mean = sum(correct) / (len(correct) * num_samples)
    return Estimate(mean, *wilson_interval(mean, effective_samples(correct, num_samples), confidence))


def effective_samples(correct: Sequence[int], num_samples: int) -> float:
    """How many independent trials the responses are worth: at least n (one a problem), at most n * k.

    n * k / deff, where the design effect `deff` is the variance between problems over that of independent trials. Few
    problems, or few of the rarer verdict, say little about it, so it is drawn towards `k` (the samples of a problem
    all agree) with the weight of two problems; at 0 or 1, where nothing can be learned of it, it is `k`.
    """
    _check_counts(correct, num_samples)
    n, k = len(correct), num_samples
    share_P = np.asarray(correct, dtype=np.float64) / k
    mean = float(share_P.mean())
    independent = mean * (1 - mean) / (n * k)
    if k == 1 or independent == 0:
        return float(n)
    deff = min(max(float(share_P.var()) / n / independent, 1.0), float(k))
    evidence = 2 * n * min(mean, 1 - mean)
    deff = (evidence * deff + _PSEUDO_PROBLEMS * k) / (evidence + _PSEUDO_PROBLEMS)
    return n * k / deff


def paired_difference(first: Sequence[float], second: Sequence[float], confidence: float) -> PairedDifference:
    """Compare two checkpoints by their per-problem accuracies (in [0, 1], same problems, same order).

    The closed form of D. G. Bonett and R. M. Price, J. Educ. Behav. Stat. 37 (2012): a normal interval after adding
    two imagined problems, one won and one lost. With one sample a problem that is their interval for paired
    proportions; with more, the same on per-problem means (and wider than need be). Raises ValueError when the lengths
    differ or are 0.
    """
    if len(first) != len(second) or not first:
        raise ValueError(f"need the same problems on both sides, got {len(first)} and {len(second)}")
    difference_P = np.asarray(second, dtype=np.float64) - np.asarray(first, dtype=np.float64)
    n = len(difference_P) + _PSEUDO_PROBLEMS
    centre = float(difference_P.sum()) / n
    variance = (float((difference_P**2).sum()) + _PSEUDO_PROBLEMS) / n - centre**2
    half = _normal_quantile(confidence) * math.sqrt(max(variance, 0.0) / n)
    value = float(difference_P.mean())
    estimate = Estimate(value, max(-1.0, min(value, centre - half)), min(1.0, max(value, centre + half)))
    wins, losses = int((difference_P > 0).sum()), int((difference_P < 0).sum())
    return PairedDifference(estimate, wins, len(difference_P) - wins - losses, losses)


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


def _check_counts(correct: Sequence[int], num_samples: int) -> None:
    if not correct:
        raise ValueError("no problems: an accuracy over nothing does not exist")
    if not all(0 <= count <= num_samples for count in correct):
        raise ValueError(f"each problem has 0 to {num_samples} correct samples, found {min(correct)}..{max(correct)}")


def _normal_quantile(confidence: float) -> float:
    return NormalDist().inv_cdf((1 + confidence) / 2)

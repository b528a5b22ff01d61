"""Confidence intervals for a share of problems, and which of them fits.

All are intervals over problems: what another set of problems of the same kind would give. How often they hold the
truth is measured by `tests/campaigns/interval_coverage.py`.

Legend: `R` sets of problems, `P` problems of a set, `C` possible counts.
"""

import math
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial

import numpy as np
from numpy.typing import NDArray
from scipy import special

EXACT_BELOW = 200
"""With fewer verdicts the jumps of a count matter, and the exact interval is taken (`verdict_interval`)."""
FEW_PROBLEMS = 30
"""With fewer problems their variance is too uncertain to rely on (`design_effect`)."""

_PSEUDO_PROBLEMS = 2.0
_LONE_PROBLEMS = 1.3
"""Weights that shrink a design effect towards its maximum; chosen by coverage (`design_effect`)."""

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Interval:
    """Bounds, and the name of the method that gave them."""

    low: float
    high: float
    method: str


def wilson_interval(share: float, num_trials: float, confidence: float) -> tuple[float, float]:
    """Wilson's score interval for a share seen in `num_trials` trials (which need not be a whole number).

    E. B. Wilson, "Probable inference, the law of succession, and statistical inference", JASA 22 (1927).
    """
    low, high = _wilson(np.array([share]), np.array([num_trials]), np.array([normal_quantile(confidence)]))
    return float(low[0]), float(high[0])


@lru_cache(maxsize=4096)
def blaker_interval(num_correct: int, num_trials: int, confidence: float) -> tuple[float, float]:
    """Blaker's interval with mid-p values for `num_correct` of `num_trials` independent verdicts.

    The shares under which the count seen is not among the least likely ones: H. Blaker, "Confidence curves and
    improved exact confidence intervals for discrete distributions", Can. J. Stat. 28 (2000), with the mid-p
    probability of the count itself, which takes away most of the exact method's excess of coverage. These shares need
    not be connected; the interval reaches from the smallest to the largest of them, to 1e-12.
    """
    alpha = 1 - confidence
    low, high = 0.0, 1.0
    if num_correct > 0:
        low = _smallest_accepted(num_correct, num_trials, alpha)
    if num_correct < num_trials:
        high = 1 - _smallest_accepted(num_trials - num_correct, num_trials, alpha)
    return low, high


def verdict_interval(num_correct: int, num_trials: int, confidence: float) -> Interval:
    """The interval for one verdict a problem: Blaker's with mid-p below 200 problems, Wilson's from there on.

    At accuracies of .05, .10, ... .95 and even sizes from 30 to 198, Blaker's holds the truth 92.6 to 98.2 % of the
    time, and outside 93 to 97 % at no size above 96; Wilson's at none above 110, and it costs nothing.
    """
    if num_trials < EXACT_BELOW:
        return Interval(*blaker_interval(num_correct, num_trials, confidence), "Blaker mid-p")
    return Interval(*wilson_interval(num_correct / num_trials, num_trials, confidence), "Wilson")


def clustered_wilson(share_RP: Array, num_samples: int, confidence: float) -> tuple[Array, Array]:
    """Bounds of the mean of each row of per-problem accuracies over `num_samples` > 1 responses each.

    Wilson's interval with the effective sample size of the clustered design in place of the number of trials (J. N. K.
    Rao and A. J. Scott, Biometrics 48 (1992); C. Franco et al., J. Surv. Stat. Methodol. 7 (2019)) and Student's t in
    place of the normal quantile, as far as the variance between problems is uncertain once the mean is known: the
    variance of a sample variance given the mean is proportional to kurtosis - 1 - skewness^2, which is 2 for a normal
    distribution and 0 where a problem is either always or never solved.
    """
    n = share_RP.shape[1]
    mean_R = share_RP.mean(axis=1)
    trials_R = n * num_samples / design_effect(share_RP, num_samples)
    quantile_R = _student_quantiles(confidence, _freedom(share_RP, num_samples))
    return _wilson(mean_R, trials_R, quantile_R)


def design_effect(share_RP: Array, num_samples: int) -> Array:
    """The variance of each row's mean over that of as many independent responses, from 1 to `num_samples`.

    L. Kish, "Survey Sampling" (1965). The estimate is shrunk towards `num_samples` (a problem's responses all agree)
    when it rests on few problems. With `FEW_PROBLEMS` or more its weight is (1.3 / m)^2, where m = (sum of x)^2 / (sum
    of x^2) is the number of problems on which the rarer verdict rests, x its share in a problem. With fewer it is that
    of two problems against the expected number of problems with the rarer verdict: wide, but safe. Where all verdicts
    are the same, nothing can be learned and it is `num_samples`.
    """
    n = share_RP.shape[1]
    mean_R = share_RP.mean(axis=1)
    rare_RP = np.where(mean_R[:, None] <= 0.5, share_RP, 1 - share_RP)
    rare_R = rare_RP.sum(axis=1)
    if n < FEW_PROBLEMS:
        weight_R = _PSEUDO_PROBLEMS / (2 * rare_R + _PSEUDO_PROBLEMS)
    else:
        weight_R = np.minimum(1.0, (_LONE_PROBLEMS**2) * _ratio((rare_RP**2).sum(axis=1), rare_R**2, 1.0) ** 2)
    effect_R = np.clip(_raw_effect(share_RP, num_samples), 1.0, num_samples)
    return np.where(rare_R > 0, effect_R + weight_R * (num_samples - effect_R), float(num_samples))


def normal_quantile(confidence: float) -> float:
    """Half-width of a two-sided normal interval, in standard errors."""
    return float(special.ndtri((1 + confidence) / 2))


def student_quantile(confidence: float, freedom: float) -> float:
    """Half-width of a two-sided Student's t interval, in standard errors; the normal one at infinite freedom."""
    return float(_student_quantiles(confidence, np.array([freedom]))[0])


def student_p(t: float, freedom: float) -> float:
    """Two-sided p-value of Student's t: P(|T| >= |t|)."""
    return float(special.betainc(freedom / 2, 0.5, freedom / (freedom + t * t)))


def _student_quantiles(confidence: float, freedom_R: Array) -> Array:
    return special.stdtrit(freedom_R, (1 + confidence) / 2)


def _raw_effect(share_RP: Array, num_samples: int) -> Array:
    n = share_RP.shape[1]
    mean_R = share_RP.mean(axis=1)
    return _ratio(share_RP.var(axis=1) * num_samples * n, mean_R * (1 - mean_R) * max(n - 1, 1), 1.0)


def _freedom(share_RP: Array, num_samples: int) -> Array:
    """Degrees of freedom of the variance given the mean; infinite where the variance is that of single responses."""
    deviation_RP = share_RP - share_RP.mean(axis=1, keepdims=True)
    second_R, third_R, fourth_R = ((deviation_RP**power).mean(axis=1) for power in (2, 3, 4))
    excess_R = _ratio(fourth_R, second_R**2, 1.0) - 1 - _ratio(third_R**2, second_R**3, 0.0)
    freedom_R = (share_RP.shape[1] - 1) * _ratio(2.0, np.clip(excess_R, 1e-9, 2.0), math.inf)
    return np.where(_raw_effect(share_RP, num_samples) > 1, np.maximum(freedom_R, 1.0), math.inf)


def _wilson(share_R: Array, trials_R: Array, quantile_R: Array) -> tuple[Array, Array]:
    squared_R = quantile_R**2
    denominator_R = 1 + squared_R / trials_R
    centre_R = (share_R + squared_R / (2 * trials_R)) / denominator_R
    spread_R = np.sqrt(share_R * (1 - share_R) / trials_R + squared_R / (4 * trials_R**2))
    half_R = quantile_R / denominator_R * spread_R
    # At a share of 0 or 1 one end is exact; rounding may put it a hair beside.
    low_R = np.clip(np.minimum(share_R, centre_R - half_R), 0.0, 1.0)
    return low_R, np.clip(np.maximum(share_R, centre_R + half_R), 0.0, 1.0)


def _smallest_accepted(num_correct: int, num_trials: int, alpha: float) -> float:
    """The smallest share under which the acceptability of `num_correct` > 0 is above `alpha`.

    Below the share seen, the acceptability is the upper tail of the count seen plus the probability of the lower counts
    with no thicker a tail. It jumps up wherever the tail of one more count becomes as thin. Between two jumps it falls,
    rises, or falls and then rises, so it first passes `alpha` in a jump or on the rise before one.
    """

    def below(count: int, share: float) -> float:
        return float(special.betaincc(count, num_trials - count + 1, share))

    def lower_tail(count: int, share: float) -> float:
        return (below(count, share) + below(count + 1, share)) / 2

    def upper_tail(share: float) -> float:
        return 1 - lower_tail(num_correct, share)

    def excess_over(count: int, share: float) -> float:
        return upper_tail(share) - lower_tail(count, share)

    def acceptability(num_thinner: int, share: float) -> float:
        return upper_tail(share) + below(num_thinner, share)

    # The acceptability is at most three times the upper tail, so it is not above alpha here.
    share = float(special.betaincinv(num_correct, num_trials - num_correct + 1, alpha / 3))
    num_thinner = bisect_right(range(num_correct), upper_tail(share), key=lambda count: lower_tail(count, share))
    for count in range(num_thinner, num_correct):
        jump = _passing(partial(excess_over, count), 0.0, share, 1.0)
        if acceptability(count, jump) > alpha:
            return _passing(partial(acceptability, count), alpha, share, jump)
        share = jump
        if acceptability(count + 1, jump) > alpha:
            break
    return share


def _passing(function: Callable[[float], float], level: float, low: float, high: float) -> float:
    """Where `function`, not above `level` at `low` and above it at `high`, passes it; at most 1e-12 before."""
    while high - low > 1e-12:
        middle = (low + high) / 2
        if function(middle) > level:
            high = middle
        else:
            low = middle
    return low


def _ratio(numerator: Array | float, denominator: Array, otherwise: float) -> Array:
    """Quotient, `otherwise` where the denominator is 0."""
    return np.divide(numerator, denominator, out=np.full(denominator.shape, otherwise), where=denominator > 0)

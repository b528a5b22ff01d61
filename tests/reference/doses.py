"""Controllers of the dose, written from the papers (and, for G2RPO-A, from the authors' code), in float64.

Each takes what was tried before, oldest first, and gives what is tried next; none knows of the other's representation.
"""

import math
from collections.abc import Sequence

import numpy as np

History = Sequence[tuple[float, float]]
"""The dose and the share of right rows of each earlier group."""


def adaback_interval(visits: History, bound: float = 0.5) -> tuple[float, float]:
    """arXiv 2506.18110: the ends between which the prompt's next share is drawn."""
    least, most = 0.0, 1.0
    for share, reward in visits:
        if reward < bound:
            least = share
        else:
            least, most = 0.0, share
    return least, most


def mfc_frontier(visits: History, num_steps: int, success: float = 0.5) -> int:
    """arXiv 2609.13997: the most steps that the prompt's next hint may have, one less than all at first."""
    frontier = num_steps
    for share, rate in visits:
        used = round(share * num_steps)
        if rate >= success and used < frontier:
            frontier = used
    return min(frontier, num_steps - 1)


def g2rpo_a_lengths(accuracies: Sequence[float], longest: float = 1.0) -> list[float]:
    """The guidance of each step and of the one after the last, in cycles of three as in the authors' callback."""
    lengths, kept = [longest], list[float]()
    for step, accuracy in enumerate(accuracies):
        length = lengths[-1]
        if step % 3 == 0:
            kept = [accuracy]
        elif step % 3 == 1:
            kept.append(accuracy)
        else:
            before = sum(kept) / 2
            if accuracy > 0 and before > 0:
                length = min(length * before / accuracy, longest)
        lengths.append(length)
    return lengths


def adaprefix_share(windows: History, target: float = 0.5, first: float = 0.5) -> float:
    """arXiv 2607.07674: the share after windows whose mean share and success these are: the root of success = target,
    by a secant inside the bracket, at most 90 % of the way, or by bisection while an end is untried."""
    below: tuple[float, float] | None = None
    above: tuple[float, float] | None = None
    share = first
    for tried, success in windows:
        if success < target:
            below = (tried, success)
            above = above if above and above[0] > tried else None
        else:
            above = (tried, success)
            below = below if below and below[0] < tried else None
        left, right = below[0] if below else 0.0, above[0] if above else 1.0
        share = (left + right) / 2
        if below and above:
            slope = (above[1] - below[1]) / (right - left)
            root, margin = left + (target - below[1]) / slope, 0.1 * (right - left)
            share = sorted((left + margin, root, right - margin))[1]
    return share


def seele_dose(rounds: History, target: float = 0.5) -> float:
    """arXiv 2509.06923: where b + (1 - b) / (1 + exp(-k (d - m))), of least squares over two rounds or more, meets the
    target; among all curves of a grid, which closes in on the best of them. The bounds are the preset's."""
    whole = [(math.log(0.5), math.log(50.0)), (-1.0, 2.0), (0.0, 0.9 if len(rounds) > 2 else 0.0)]
    ends = whole
    for _ in range(24):
        log_k, m, b = np.meshgrid(*(np.linspace(*each, 31) for each in ends), indexing="ij")
        curves = [b + (1 - b) / (1 + np.exp(-np.exp(log_k) * (dose - m))) for dose, _ in rounds]
        errors = sum((curve - rate) ** 2 for curve, (_, rate) in zip(curves, rounds, strict=True))
        best = [float(axis.flat[np.argmin(errors)]) for axis in (log_k, m, b)]
        ends = [
            (max(low, at - 0.3 * (last - first)), min(high, at + 0.3 * (last - first)))
            for at, (first, last), (low, high) in zip(best, ends, whole, strict=True)
        ]
    k, middle, least = math.exp(best[0]), *best[1:]
    if least >= target:
        return 0.0
    return min(max(middle - math.log((1 - target) / (target - least)) / k, 0.0), 1.0)

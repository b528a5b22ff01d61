"""Shares as whole numbers: how many prompts of a step come from where."""

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise

from luffy.rl.random_numbers import uniform

_GOLDEN = (math.sqrt(5) - 1) / 2
"""Its multiples, modulo 1, fill the interval evenly."""


def quotas(weights: Sequence[float], count: int, offset: float) -> list[int]:
    """`count` in parts of these weights; each part is its exact share, rounded up or down.

    Systematic sampling (Madow 1949): part k counts the whole numbers between two partial sums of the shares, shifted by
    `offset` in [0, 1). Over evenly spread offsets every part has its exact share on average.
    """
    total = sum(weights)
    # Rounded, so that sums which are whole numbers in exact arithmetic are so here.
    ends = [0.0, *(round(end * count / total, 9) for end in accumulate(weights))]
    return [math.floor(end + offset) - math.floor(start + offset) for start, end in pairwise(ends)]


def step_offset(seed: int, purpose: str, step: int, num_drawn: int = 0) -> float:
    """The offset of a step's quotas: begins at random and moves by the golden section from step to step.

    `num_drawn` tells the rounds of dynamic sampling apart.
    """
    return (uniform(seed, purpose, num_drawn) + step * _GOLDEN) % 1.0


def available_quotas(
    shares: Mapping[str, float], sizes: Mapping[str, int], count: int, offset: float
) -> dict[str, int]:
    """`count` in parts of these shares, none above its size; what a part lacks is shared out over the others.

    Parts with share 0 give only what no other can. Less than `count` where all sizes together are less.
    """
    given = dict.fromkeys(shares, 0)
    while (left := min(count, sum(sizes.values())) - sum(given.values())) > 0:
        rest = {name: share for name, share in shares.items() if given[name] < sizes[name]}
        wanted = {name: share for name, share in rest.items() if share > 0} or dict.fromkeys(rest, 1.0)
        for name, extra in zip(wanted, quotas([*wanted.values()], left, offset), strict=True):
            given[name] = min(sizes[name], given[name] + extra)
    return given

"""Splits a number of prompts into whole-number quotas."""

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise

from luffy.seeds import uniform

_GOLDEN = (math.sqrt(5) - 1) / 2
"""Its multiples, modulo 1, fill the interval evenly."""


def quotas(weights: Sequence[float], count: int, offset: float) -> list[int]:
    """Split `count` in proportion to `weights`; each part is its exact share, rounded up or down.

    Systematic sampling (Madow 1949): part k counts the whole numbers between two partial sums of the shares, shifted by
    `offset` in [0, 1). Over evenly spread offsets every part has its exact share on average.
    """
    total = sum(weights)
    # Rounded, so that sums which are whole numbers in exact arithmetic are so here.
    ends = [0.0, *(round(end * count / total, 9) for end in accumulate(weights))]
    return [math.floor(end + offset) - math.floor(start + offset) for start, end in pairwise(ends)]


def step_offset(seed: int, purpose: str, step: int, num_drawn: int = 0) -> float:
    """The offset of a step's quotas: starts at random and moves by the golden ratio from step to step.

    `num_drawn` distinguishes the rounds of dynamic sampling.
    """
    return (uniform(seed, purpose, num_drawn) + step * _GOLDEN) % 1.0


def available_quotas(
    shares: Mapping[str, float], sizes: Mapping[str, int], count: int, offset: float
) -> dict[str, int]:
    """Split `count` in proportion to `shares`, no part above its size; the others make up for a part that is too small.

    Parts with share 0 are used only once all others are exhausted. The sum is below `count` where all sizes together
    are.
    """
    given = dict.fromkeys(shares, 0)
    while (left := min(count, sum(sizes.values())) - sum(given.values())) > 0:
        rest = {name: share for name, share in shares.items() if given[name] < sizes[name]}
        wanted = {name: share for name, share in rest.items() if share > 0} or dict.fromkeys(rest, 1.0)
        for name, extra in zip(wanted, quotas([*wanted.values()], left, offset), strict=True):
            given[name] = min(sizes[name], given[name] + extra)
    return given

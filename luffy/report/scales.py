"""Ranges of values on an axis, and where its ticks are."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

_STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)


@dataclass(frozen=True, slots=True)
class Range:
    """What an axis shows; `low < high`."""

    low: float
    high: float

    def share(self, value: float) -> float:
        """Where `value` lies between the ends, as 0 to 1."""
        return (value - self.low) / (self.high - self.low)


def spread(values: Sequence[float], margin: float = 0.0) -> Range:
    """The range of `values` with a margin on both sides, as a share of it; never of width 0."""
    low, high = min(values), max(values)
    if high == low:
        room = abs(low) / 20 or 1.0
        return Range(low - room, high + room)
    room = margin * (high - low)
    return Range(low - room, high + room)


def ticks(shown: Range, most: int, *, whole: bool = False) -> list[float]:
    """At most `most` + 1 round numbers inside the range, evenly spaced; `whole`: integers only."""
    rough = (shown.high - shown.low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in _STEPS if power * factor >= rough * (1 - 1e-9))
    if whole:
        step = float(max(1, math.ceil(step)))
    first = math.ceil(shown.low / step - 1e-9)
    last = math.floor(shown.high / step + 1e-9)
    return [index * step for index in range(first, last + 1)] or [shown.low]

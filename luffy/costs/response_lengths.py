"""How long the responses of a measurement are: as the policy answers, or as an assumption says."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from luffy.files import write_atomic
from luffy.seeds import derive_seed

PACE_FILE = "pace.json"
_HALVINGS = 60

Way = Literal["natural", "traces", "mean", "bound"]


@dataclass(frozen=True, slots=True)
class Pace:
    """The lengths of the responses to measure with."""

    way: Way
    """`natural`: the policy ends its responses itself. `traces`: they are as long as the traces. `mean`: they have the
    mean `mean`, spread like an exponential distribution that is cut at the limit. `bound`: all have the limit."""
    words: str
    """The assumption, for the user."""
    mean: float | None = None


def write_pace(directory: Path, pace: Pace) -> None:
    """Put the pace into a stage's directory."""
    write_atomic(directory / PACE_FILE, json.dumps(asdict(pace)) + "\n")


def read_pace(directory: Path) -> Pace:
    """The pace in a stage's directory."""
    return Pace(**json.loads((directory / PACE_FILE).read_text(encoding="utf-8")))


def spread_lengths(count: int, mean: float, limit: int) -> list[int]:
    """`count` lengths of 1 to `limit` tokens with the given mean: quantiles of a cut exponential distribution.

    With X exponential of scale s, min(X, c) has the mean s (1 - exp(-c / s)), which is solved for s by bisection.
    """
    if mean >= limit:
        return [limit] * count
    low, high = 0.0, 1.0
    while _cut_mean(high, limit) < mean and high < 1e12:
        high *= 2
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if _cut_mean(middle, limit) < mean else (low, middle)
    quantiles = ((place + 0.5) / count for place in range(count))
    return [max(1, round(min(-high * math.log1p(-quantile), limit))) for quantile in quantiles]


def shuffled(lengths: Sequence[int], seed: int) -> list[int]:
    """The same lengths in an order that the seed decides."""
    order = sorted(range(len(lengths)), key=lambda place: derive_seed(seed, "length", place))
    return [lengths[place] for place in order]


def _cut_mean(scale: float, limit: int) -> float:
    return 0.0 if scale == 0 else scale * -math.expm1(-limit / scale)

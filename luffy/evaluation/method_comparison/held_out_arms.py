"""Held-out accuracy of arms while they train: means over seeds with bands, and steps to reach an accuracy."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from statistics import fmean

from luffy.statistics.over_seeds import seed_interval
from luffy.tracking.metrics import HeldOutPoint

_LEVELS = tuple(level / 10 for level in range(1, 10))


@dataclass(frozen=True, slots=True)
class Reached:
    """How far the seeds of an arm were when they first measured an accuracy."""

    num_seeds: int
    """Seeds that measured it at all."""
    steps: float | None
    """Mean optimizer steps over seeds; None where a seed did not get there, since the mean of the others would be too
    good."""


def mean_curve(curves: Sequence[Sequence[HeldOutPoint]], confidence: float) -> tuple[HeldOutPoint, ...]:
    """Means over the seeds of an arm, measurement by measurement, up to the end of the shortest.

    The bounds are Student's t over seeds; with one seed they stay those over its problems.
    """
    measured = [curve for curve in curves if curve]
    return tuple(_mean(points, confidence) for points in zip(*measured, strict=False))


def levels(curves: Sequence[Sequence[HeldOutPoint]]) -> tuple[float, ...]:
    """The tenths of accuracy that some seed reached, and that not all had at their first measurement."""
    measured = [curve for curve in curves if curve]
    if not measured:
        return ()
    start = min(curve[0].accuracy for curve in measured)
    most = max(point.accuracy for curve in measured for point in curve)
    return tuple(level for level in _LEVELS if start < level <= most)


def reached(curves: Sequence[Sequence[HeldOutPoint]], level: float) -> Reached:
    """When the seeds of an arm first measured `level` or more."""
    firsts = [next((point.steps for point in curve if point.accuracy >= level), None) for curve in curves]
    known = [steps for steps in firsts if steps is not None]
    return Reached(len(known), fmean(known) if known and len(known) == len(firsts) else None)


def suites_of(curves: Sequence[Mapping[str, object]]) -> list[str]:
    """All suites that were measured, in order."""
    return list(dict.fromkeys(suite for measured in curves for suite in measured))


def _mean(points: Sequence[HeldOutPoint], confidence: float) -> HeldOutPoint:
    means = {field.name: fmean(getattr(point, field.name) for point in points) for field in fields(HeldOutPoint)}
    if len(points) > 1:
        means["low"], means["high"] = seed_interval([point.accuracy for point in points], confidence)
    return HeldOutPoint(**means)

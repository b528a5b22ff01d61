"""Held-out accuracy over a training, read from the metrics of its stages."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from luffy.tracking.metrics import MetricRow, training_rows

_START, _END = "val/", "/accuracy"


@dataclass(frozen=True, slots=True)
class HeldOutPoint:
    """Accuracy on one suite, and what training had spent by then."""

    accuracy: float
    low: float
    high: float
    """Bounds of the interval over problems."""
    steps: float
    """Optimizer steps."""
    samples: float
    """Rows that were learned from: rollouts and traces."""
    seconds: float
    """Time in training steps; measuring does not count."""


def held_out_curves(stages: Sequence[Sequence[MetricRow]]) -> dict[str, tuple[HeldOutPoint, ...]]:
    """The points of each suite, over the stages of a chain one after the other; empty without validation."""
    points: dict[str, list[HeldOutPoint]] = {}
    steps = samples = seconds = 0.0
    for rows in stages:
        for row in rows:
            if training_rows([row]):
                # An optimizer step each in SFT, which does not count them.
                steps += row.get("batch/optimizer_steps", 1.0)
                samples += row.get("batch/num_rows", 0.0)
                seconds += row.get("perf/step_s", 0.0)
            for suite in _suites(row):
                bounds = row[f"val/{suite}/accuracy_low"], row[f"val/{suite}/accuracy_high"]
                point = HeldOutPoint(row[f"val/{suite}{_END}"], *bounds, steps, samples, seconds)
                points.setdefault(suite, []).append(point)
    return {suite: tuple(found) for suite, found in points.items()}


def accuracy_names(rows: Iterable[MetricRow]) -> list[str]:
    """Names of the metrics of single suites, in order; `val/accuracy` is the mean over them."""
    names = dict.fromkeys(name for row in rows for name in row)
    return [name for name in names if name.startswith(_START) and name.endswith(_END) and name != "val/accuracy"]


def _suites(row: MetricRow) -> list[str]:
    return [name.removeprefix(_START).removesuffix(_END) for name in accuracy_names([row])]

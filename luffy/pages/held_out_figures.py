"""Held-out accuracy while training: the figures of a stage in the report."""

from collections.abc import Sequence

from luffy.pages.panels import Figure
from luffy.pages.plotter import Dot, band_plot
from luffy.tracking.metrics import MetricRow, held_out_curves

_COLOR = "c3"


def held_out_figures(node: str, rows: Sequence[MetricRow]) -> list[Figure]:
    """One figure per suite over optimizer steps, from before training on; none without validation."""
    return [
        Figure(
            f"Held-out accuracy, {suite}",
            "By the engine in training; the first point is the policy before training. Band: interval over problems.",
            (),
            band_plot(
                f"{node}-held-out-{suite}",
                [point.steps for point in points],
                [Dot(_COLOR, point.accuracy, point.low, point.high) for point in points],
                over="optimizer step",
            ),
        )
        for suite, points in held_out_curves([rows]).items()
    ]

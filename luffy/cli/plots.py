"""Curves of a run: in the terminal out of braille dots, or as PNGs of the panels that the report has."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from luffy.files import replacing
from luffy.pipeline.records import RunRecord
from luffy.tracking.metrics import METRICS_FILE, MetricRow, read_metrics

if TYPE_CHECKING:  # loads matplotlib
    from luffy.pages.panels import Panel

_WIDTH, _HEIGHT = 60, 6
_DOT_ROWS, _DOT_COLUMNS = 4, 2
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
_BLANK = 0x2800
_METRICS = ("reward/mean", "actor/loss", "actor/entropy_on_policy", "rollout/response_length_mean")
_TRAINING = ("base", "sft", "rl")
_PANELS_A_ROW = 3
_INCHES = (4.2, 2.6)


def terminal_plots(record: RunRecord) -> list[str]:
    """A picture of several lines for each of the main curves of each training stage."""
    pictures = []
    for node, rows in _curves(record).items():
        for metric in _METRICS:
            points = _points(metric, rows)
            if len(points) > 1:
                pictures.append(f"{node} {metric}\n{plot(points)}")
    return pictures


def plot(points: Sequence[tuple[float, float]]) -> str:
    """The points as dots, the bounds of both axes beside them; several in one column are their mean."""
    xs, ys = [x for x, _ in points], [y for _, y in points]
    low, high, first, last = min(ys), max(ys), min(xs), max(xs)
    columns: dict[int, list[float]] = {}
    for x, y in points:
        columns.setdefault(_place(x, first, last, _WIDTH * _DOT_COLUMNS), []).append(y)
    cells = [[_BLANK] * _WIDTH for _ in range(_HEIGHT)]
    for column, values in columns.items():
        row = _HEIGHT * _DOT_ROWS - 1 - _place(sum(values) / len(values), low, high, _HEIGHT * _DOT_ROWS)
        cells[row // _DOT_ROWS][column // _DOT_COLUMNS] |= _DOTS[row % _DOT_ROWS][column % _DOT_COLUMNS]
    labels = [f"{high:.4g}", *[""] * (_HEIGHT - 2), f"{low:.4g}"]
    margin = max(map(len, labels))
    lines = [f"{label:>{margin}} │{''.join(map(chr, row))}".rstrip() for label, row in zip(labels, cells, strict=True)]
    return "\n".join([*lines, f"{'':>{margin}} └{first:g} {'─' * (_WIDTH - 16)} step {last:g}"])


def write_pngs(record: RunRecord, folder: Path) -> list[Path]:
    """A PNG for each training stage in `folder`, with the panels of the report; returns the files."""
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for node, rows in _curves(record).items():
        file = folder / f"{record.name}-{node}.png"
        if _draw(file, f"{record.name}: {node}", _panels(record, node), rows):
            files.append(file)
    return files


def _place(value: float, low: float, high: float, count: int) -> int:
    """Which of `count` equal parts of the range `value` lies in."""
    return min(int((value - low) / (high - low) * count), count - 1) if high > low else 0


def _curves(record: RunRecord) -> dict[str, list[MetricRow]]:
    found = {node: record.stages[node].directory for node in _TRAINING if node in record.stages}
    return {node: rows for node, directory in found.items() if (rows := read_metrics(directory / METRICS_FILE))}


def _panels(record: RunRecord, node: str) -> "Sequence[Panel]":
    from luffy.pages.panels import rl_panels, supervised_panels

    if node != "rl":
        return supervised_panels()
    config = record.configuration
    return rl_panels(config.objective.terms if config is not None and config.objective is not None else ())


def _draw(file: Path, title: str, panels: "Sequence[Panel]", rows: Sequence[MetricRow]) -> bool:
    """Whether there was anything to draw."""
    from matplotlib.figure import Figure

    shown = [panel for panel in panels if any(_points(curve.metric, rows) for curve in panel.curves)]
    if not shown:
        return False
    num_rows = math.ceil(len(shown) / _PANELS_A_ROW)
    figure = Figure((_INCHES[0] * _PANELS_A_ROW, _INCHES[1] * num_rows), layout="constrained")
    figure.suptitle(title)
    for index, panel in enumerate(shown):
        axes = figure.add_subplot(num_rows, _PANELS_A_ROW, index + 1)
        axes.set_title(panel.title, fontsize="medium")
        axes.grid(alpha=0.3)
        for curve in panel.curves:
            if points := _points(curve.metric, rows):
                axes.plot(*zip(*points, strict=True), label=curve.label, linewidth=1.2)
        if len(panel.curves) > 1:
            axes.legend(fontsize="small")
    with replacing(file) as target:
        figure.savefig(target, format="png", dpi=110)
    return True


def _points(metric: str, rows: Sequence[MetricRow]) -> list[tuple[float, float]]:
    return [(row["step"], row[metric]) for row in rows if math.isfinite(row.get(metric, math.nan))]

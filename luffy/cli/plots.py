"""Curves of a run: in the terminal as braille dots, or as SVG files with the panels of the report."""

import math
from collections.abc import Sequence
from pathlib import Path

from luffy.errors import ConfigError
from luffy.files import write_atomic
from luffy.pages.headline import CURVE_METRICS
from luffy.pages.panels import Panel, panel_plots, rl_panels, supervised_panels
from luffy.pages.plotter import picture_svg
from luffy.pipeline.chain.graph import nodes_showing
from luffy.pipeline.workspace.records import RunRecord
from luffy.tracking.metrics import METRICS_FILE, MetricRow, accuracy_names, read_metrics

_WIDTH, _HEIGHT = 60, 6
_DOT_ROWS, _DOT_COLUMNS = 4, 2
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
_BLANK = 0x2800


def terminal_plots(record: RunRecord) -> list[str]:
    """A picture of several lines for each of the main curves of each training stage."""
    pictures = []
    for node, rows in _curves(record).items():
        for metric in (*CURVE_METRICS, *accuracy_names(rows)):
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


def write_pictures(record: RunRecord, folder: Path) -> list[Path]:
    """Write an SVG per training stage to `folder`, with the panels of the report; returns the files.

    Raises ConfigError where the folder cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--svg {folder}: cannot be made ({error.strerror}); give another folder") from None
    files = []
    for node, rows in _curves(record).items():
        if plots := panel_plots(_panels(record, node), rows):
            files.append(folder / f"{record.name}-{node}.svg")
            write_atomic(files[-1], picture_svg(plots, columns=3))
    return files


def _place(value: float, low: float, high: float, count: int) -> int:
    """Index of the one of `count` equal bins of the range that contains `value`."""
    return min(int((value - low) / (high - low) * count), count - 1) if high > low else 0


def _curves(record: RunRecord) -> dict[str, list[MetricRow]]:
    found = {node: record.stages[node].directory for node in nodes_showing("training_curves", record.stages)}
    return {node: rows for node, directory in found.items() if (rows := read_metrics(directory / METRICS_FILE))}


def _panels(record: RunRecord, node: str) -> Sequence[Panel]:
    if node != "rl":
        return supervised_panels()
    config = record.configuration
    return rl_panels(config.objective.terms if config is not None and config.objective is not None else ())


def _points(metric: str, rows: Sequence[MetricRow]) -> list[tuple[float, float]]:
    return [(row["step"], row[metric]) for row in rows if math.isfinite(row.get(metric, math.nan))]

"""Small plots as `data:` URLs, which the Prefect UI shows without any host to fetch them from.

Written by hand instead of by matplotlib: a running flow draws them again and again beside a training, and a cached
run has no time for an import of half a second.
"""

import base64
import html
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

_WIDTH, _HEIGHT = 460, 250
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 14, 46, 34
_COLUMNS = 2
_MAX_POINTS = 300
_COLORS = ("#2563eb", "#d97706", "#059669", "#7c3aed", "#dc2626", "#0891b2")
_TICKS = 4
_STYLE = (
    "text{font:12px system-ui,'DejaVu Sans',sans-serif;fill:#475569}"
    ".t{font-weight:600;font-size:14px;fill:#0f172a}.g{stroke:#e2e8f0}"
)


@dataclass(frozen=True, slots=True)
class Line:
    """One curve; points that are not finite are left out."""

    label: str
    points: Sequence[tuple[float, float]]
    """(x, y)."""


@dataclass(frozen=True, slots=True)
class Panel:
    """One plot of a picture."""

    title: str
    lines: Sequence[Line]
    percent: bool = False
    """The values are shares, shown from 0 to 100 %."""
    places: Sequence[str] = ()
    """Names for x = 0, 1, 2, ...; empty: x is a step."""


def picture_url(panels: Sequence[Panel]) -> str:
    """The panels, two a row, as one SVG in a `data:` URL."""
    return "data:image/svg+xml;base64," + base64.b64encode(picture_svg(panels).encode()).decode()


def picture_svg(panels: Sequence[Panel]) -> str:
    """The panels, two a row; those without a point are left out."""
    drawn = [panel for panel in (_finite(panel) for panel in panels) if panel.lines]
    columns = min(_COLUMNS, max(len(drawn), 1))
    width, height = columns * _WIDTH, math.ceil(len(drawn) / columns) * _HEIGHT
    parts = [
        f'<g transform="translate({index % columns * _WIDTH},{index // columns * _HEIGHT})">{"".join(_draw(panel))}</g>'
        for index, panel in enumerate(drawn)
    ]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">'
        f'<style>{_STYLE}</style><rect width="100%" height="100%" fill="#ffffff"/>{"".join(parts)}</svg>'
    )


def _finite(panel: Panel) -> Panel:
    lines = [
        Line(line.label, [(x, y) for x, y in line.points if math.isfinite(x) and math.isfinite(y)])
        for line in panel.lines
    ]
    return Panel(panel.title, [line for line in lines if line.points], panel.percent, panel.places)


def _draw(panel: Panel) -> Iterator[str]:
    frame = _frame(panel)
    yield f'<text class="t" x="{_LEFT}" y="18">{html.escape(panel.title)}</text>'
    yield from _legend(panel)
    yield from _axes(panel, frame)
    for index, line in enumerate(panel.lines):
        yield _curve(line, frame, _COLORS[index % len(_COLORS)], marked=bool(panel.places))


@dataclass(frozen=True, slots=True)
class _Frame:
    """From values to pixels."""

    x_low: float
    x_high: float
    y_low: float
    y_high: float

    def x(self, value: float) -> float:
        share = (value - self.x_low) / (self.x_high - self.x_low)
        return _LEFT + share * (_WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        share = (value - self.y_low) / (self.y_high - self.y_low)
        return _HEIGHT - _BOTTOM - share * (_HEIGHT - _TOP - _BOTTOM)


def _frame(panel: Panel) -> _Frame:
    xs = [x for line in panel.lines for x, _ in line.points]
    ys = [y for line in panel.lines for _, y in line.points]
    x_low, x_high = (-0.3, len(panel.places) - 0.7) if panel.places else (min(xs), max(xs))
    y_low, y_high = (0.0, 1.0) if panel.percent else (min(ys), max(ys))
    x_room, y_room = x_high - x_low or 1.0, y_high - y_low or abs(y_high) or 1.0
    margin = 0.0 if panel.percent else 0.06 * y_room
    return _Frame(x_low, x_low + x_room, y_low - margin, y_low + y_room + margin)


def _legend(panel: Panel) -> Iterator[str]:
    if len(panel.lines) == 1 and panel.lines[0].label == panel.title:
        return
    left = _LEFT
    for index, line in enumerate(panel.lines):
        yield f'<rect x="{left}" y="27" width="14" height="4" fill="{_COLORS[index % len(_COLORS)]}"/>'
        yield f'<text x="{left + 18}" y="34">{html.escape(line.label)}</text>'
        left += 32 + 7 * len(line.label)


def _axes(panel: Panel, frame: _Frame) -> Iterator[str]:
    for index in range(_TICKS + 1):
        value = frame.y_low + (frame.y_high - frame.y_low) * index / _TICKS
        y = f"{frame.y(value):.1f}"
        words = f"{value:.0%}" if panel.percent else f"{value:.3g}"
        yield f'<line class="g" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y}" y2="{y}"/>'
        yield f'<text x="{_LEFT - 7}" y="{y}" dy="4" text-anchor="end">{words}</text>'
    for x, words, anchor in _x_ticks(panel, frame):
        yield f'<text x="{frame.x(x):.1f}" y="{_HEIGHT - 14}" text-anchor="{anchor}">{html.escape(words)}</text>'


def _x_ticks(panel: Panel, frame: _Frame) -> Iterator[tuple[float, str, str]]:
    if panel.places:
        yield from ((float(index), name, "middle") for index, name in enumerate(panel.places))
        return
    last = max(x for line in panel.lines for x, _ in line.points)
    yield frame.x_low, f"step {frame.x_low:.0f}", "start"
    if last > frame.x_low:
        yield last, f"{last:.0f}", "end"


def _curve(line: Line, frame: _Frame, color: str, *, marked: bool) -> str:
    points = [(frame.x(x), frame.y(y)) for x, y in _thin(line.points)]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    dots = (
        "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5"/>' for x, y in points) if marked or len(points) < 12 else ""
    )
    drawn = f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"/>'
    return f'<g fill="{color}">{drawn}{dots}</g>'


def _thin(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """At most `_MAX_POINTS`: the means of equal stretches."""
    size = math.ceil(len(points) / _MAX_POINTS)
    stretches = [points[start : start + size] for start in range(0, len(points), size)]
    return [(sum(x for x, _ in part) / len(part), sum(y for _, y in part) / len(part)) for part in stretches]

"""The one plotter: SVG for pages, for the Prefect UI and for files. The same input gives the same bytes.

Colours are CSS variables (`var(--c1)`), so a plot inside a page follows its light or dark style; pictures that stand
alone (`picture_svg`) get fixed colours. Written by hand, since a flow redraws repeatedly while a stage trains, and
importing a plotting library would be too slow.
"""

import base64
import html
import math
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle

from luffy.report.scales import Range, spread, ticks

_COLORS = ("c1", "c2", "c3", "c4", "c5", "c7")
_FIXED = {
    "fg": "#1c1e21", "muted": "#666a70", "grid": "#e6e6e2", "c1": "#2b66c9", "c2": "#d2691e", "c3": "#2e8b57",
    "c4": "#9a4fb5", "c5": "#b8960c", "c6": "#8a9199", "c7": "#b03a48",
    "c8": "#1f9aa8",
}  # fmt: skip
"""The light style of `templates/report.css`."""
_PLACE_CHARACTERS = 14
"""Longer names of places are broken into lines."""
_MAX_POINTS = 400
_SMOOTH_FROM = 30
"""Curves with fewer points are not smoothed."""
_MARKED_BELOW = 12
_WIDTH, _HEIGHT = 288.0, 140.0
_FONT, _TITLE_FONT = 9.0, 10.0
_CHARACTER = 5.4
"""Width of a character at `_FONT`, on the safe side."""
_TOP, _RIGHT, _BOTTOM = 6.0, 8.0, 26.0
_ROWS_WIDTH, _ROW = 331.0, 13.7
_CAPTION = 30.0
_COLUMNS = 2

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Series:
    """One line of a curve plot; points that are not finite are left out."""

    label: str
    color: str
    """Name of a CSS variable, e.g. `c1`."""
    steps: Sequence[float]
    values: Sequence[float]

    @property
    def points(self) -> list[tuple[float, float]]:
        pairs = zip(self.steps, self.values, strict=True)
        return [(x, y) for x, y in pairs if math.isfinite(x) and math.isfinite(y)]


@dataclass(frozen=True, slots=True)
class Plot:
    """Curves over steps, with a title."""

    title: str
    series: Sequence[Series]
    percent: bool = False
    """Values are shares, shown in percent."""
    exact: bool = False
    """Set, not measured: drawn without smoothing, from 0."""
    over: str = "step"
    places: Sequence[str] = ()
    """Names for x = 0, 1, 2, ...; empty: x is a number."""


@dataclass(frozen=True, slots=True)
class Dot:
    """An estimate with its interval, in [0, 1]."""

    color: str
    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Share:
    """One part of a stacked bar."""

    color: str
    value: float


def colored(curves: Mapping[str, Points]) -> list[Series]:
    """Series by label, each in its own colour until the palette is exhausted."""
    return [
        Series(label, color, [x for x, _ in points], [y for _, y in points])
        for (label, points), color in zip(curves.items(), cycle(_COLORS), strict=False)
    ]


def curve_plot(
    name: str, series: Sequence[Series], *, percent: bool = False, exact: bool = False, over: str = "step"
) -> str:
    """Lines over `over`; long ones are faint with a running mean on top, unless they are `exact` (drawn from 0)."""
    plot = Plot(name, [line for line in series if line.points], percent, exact, over)
    return _svg(name, _WIDTH, _HEIGHT, _curves(plot, bounded=False))


def band_plot(name: str, steps: Sequence[float], estimates: Sequence[Dot], over: str = "step") -> str:
    """Estimates over steps, in one colour, with their intervals as a band."""
    return bands_plot(name, [(steps, estimates)], over)


def bands_plot(name: str, curves: Sequence[tuple[Sequence[float], Sequence[Dot]]], over: str) -> str:
    """Several curves of estimates over `over`, each in the colour of its dots, with their intervals as bands."""
    xs = [x for steps, _ in curves for x in steps]
    ys = [bound for _, estimates in curves for dot in estimates for bound in (dot.low, dot.high)]
    frame = _frame(spread(xs, 0.02), spread(ys), True)
    few = xs if len(curves) == 1 and len(xs) <= 8 else ticks(spread(xs), 6, whole=True)
    bands = [mark for steps, estimates in curves for mark in _band(frame, steps, estimates)]
    return _svg(name, _WIDTH, _HEIGHT, [*_axes(frame, True, over, few), *bands])


def place_plot(name: str, places: Sequence[str], lines: Sequence[tuple[str, Sequence[Dot | None]]], over: str) -> str:
    """Estimates with their intervals at named places, a line for each colour; None leaves a gap."""
    dots = [dot for _, estimates in lines for dot in estimates if dot is not None]
    ys = spread([dot.low for dot in dots] + [dot.high for dot in dots], 0.05)
    frame = _frame(Range(-0.3, len(places) - 0.7), ys, True)
    marks = [*_axes(frame, True, "", list(range(len(places))), places)]
    marks.append(_text(over, (frame.left + frame.right) / 2, frame.bottom + 22))
    for index, (color, estimates) in enumerate(lines):
        # Beside each other, so that no interval hides another.
        shift = 0.035 * (index - (len(lines) - 1) / 2)
        known = [(x + shift, dot) for x, dot in enumerate(estimates) if dot is not None]
        for x, dot in known:
            at = f"{frame.x(x):.1f}"
            ends = f'x1="{at}" x2="{at}" y1="{frame.y(dot.low):.1f}" y2="{frame.y(dot.high):.1f}"'
            marks.append(f'<line {ends} {_stroke(color, 1.2)} opacity="0.45"/>')
            marks.append(f'<circle cx="{at}" cy="{frame.y(dot.value):.1f}" r="2.2" {_fill(color)}/>')
        marks.append(_polyline(frame, [(x, dot.value) for x, dot in known], _stroke(color, 1.5)))
    return _svg(name, _WIDTH, _HEIGHT, marks)


def heat_plot(
    name: str,
    rows: tuple[str, Sequence[str]],
    columns: tuple[str, Sequence[str]],
    values: Sequence[Sequence[float | None]],
) -> str:
    """Shares as a map, row by row, the darker the higher; each axis is a title with its places. None stays empty."""
    known = [value for row in values for value in row if value is not None]
    shown = spread(known) if known else Range(0.0, 1.0)
    left = 8 + _CHARACTER * max(map(len, [*rows[1], rows[0]]))
    width, height = (_WIDTH - _RIGHT - left) / len(columns[1]), 2 * _ROW
    bottom = _ROW + height * len(rows[1])
    marks = [_text(rows[0], left - 5, 0.7 * _ROW, anchor="end")]
    for row, (place, line) in enumerate(zip(rows[1], values, strict=True)):
        top = _ROW + height * row
        marks.append(_text(place, left - 5, top + height / 2 + 3, anchor="end"))
        for column, value in enumerate(line):
            x = left + width * column
            if value is not None:
                box = f'x="{x:.1f}" y="{top:.1f}" width="{width - 1:.1f}" height="{height - 1:.1f}"'
                marks.append(f'<rect {box} {_fill("c1")} opacity="{0.08 + 0.5 * shown.share(value):.3f}"/>')
            text = "–" if value is None else f"{100 * value:.1f}"
            marks.append(_text(text, x + width / 2, top + height / 2 + 3, "fg"))
    middles = [left + width * (column + 0.5) for column in range(len(columns[1]))]
    marks += [_text(place, x, bottom + 11) for place, x in zip(columns[1], middles, strict=True)]
    marks.append(_text(columns[0], (left + _WIDTH - _RIGHT) / 2, bottom + 23))
    return _svg(name, _WIDTH, bottom + 28, marks)


def stacked_plot(name: str, series: Sequence[Series]) -> str:
    """Shares over steps, stacked to 100 %."""
    smooth = [_smooth(_thin(line.points)) for line in series]
    steps = [x for x, _ in smooth[0]]
    frame = _frame(spread(steps), Range(0.0, 1.0), True)
    marks = [*_axes(frame, True, "step", ticks(frame.xs, 6, whole=True))]
    if len(steps) == 1:  # a single point has no width
        steps = [frame.xs.low, frame.xs.high]
        smooth = [2 * points for points in smooth]
    below = [0.0] * len(steps)
    for line, points in zip(series, smooth, strict=True):
        above = [low + y for low, (_, y) in zip(below, points, strict=True)]
        edge = [*zip(steps, above, strict=True), *reversed(list(zip(steps, below, strict=True)))]
        marks.append(f'<polygon points="{frame.path(edge)}" {_fill(line.color)} opacity="0.85"/>')
        below = above
    return _svg(name, _WIDTH, _HEIGHT, marks)


def dot_plot(name: str, rows: Sequence[tuple[str, Sequence[Dot]]]) -> str:
    """Estimates with their intervals on a scale from 0 to 100 %, in titled bands."""
    frame = _rows_frame(rows)
    marks = [*_rows_axes(frame, rows)]
    for (_, dots), heights in zip(rows, _row_heights(rows), strict=True):
        for dot, y in zip(dots, heights, strict=True):
            ends = f'x1="{frame.x(dot.low):.1f}" x2="{frame.x(dot.high):.1f}" y1="{y:.1f}" y2="{y:.1f}"'
            marks.append(f'<line {ends} {_stroke(dot.color, 2.4)} opacity="0.55" stroke-linecap="round"/>')
            marks.append(f'<circle cx="{frame.x(dot.value):.1f}" cy="{y:.1f}" r="3" {_fill(dot.color)}/>')
    return _svg(name, _ROWS_WIDTH, frame.bottom + 20, marks)


def bar_plot(name: str, rows: Sequence[tuple[str, Sequence[tuple[str, Sequence[Share]]]]]) -> str:
    """Stacked shares, a labelled bar each, in titled bands."""
    longest = max((len(label) for _, bars in rows for label, _ in bars), default=0)
    frame = _rows_frame(rows, left=8 + _CHARACTER * longest)
    marks = [*_rows_axes(frame, rows)]
    for (_, bars), heights in zip(rows, _row_heights(rows), strict=True):
        for (label, shares), y in zip(bars, heights, strict=True):
            marks.append(_text(label, frame.left - 5, y + 3, anchor="end"))
            marks += _bar(frame, shares, y)
    return _svg(name, _ROWS_WIDTH, frame.bottom + 20, marks)


def picture_svg(plots: Sequence[Plot], columns: int = _COLUMNS) -> str:
    """Plots with titles and legends in a grid, as one self-contained file; those without a point are left out."""
    drawn = [replace(plot, series=[line for line in plot.series if line.points]) for plot in plots]
    drawn = [plot for plot in drawn if plot.series]
    columns = min(columns, max(len(drawn), 1))
    width, height = columns * (_WIDTH + 12), math.ceil(len(drawn) / columns) * (_HEIGHT + _CAPTION + 8)
    cells = [
        f'<g transform="translate({6 + index % columns * (_WIDTH + 12):g},'
        f'{4 + index // columns * (_HEIGHT + _CAPTION + 8):g})">{"".join(_captioned(plot))}</g>'
        for index, plot in enumerate(drawn)
    ]
    return _alone(width, height, "".join(cells))


def gallery_svg(panels: Sequence[tuple[str, str]], legend: Sequence[tuple[str, str]], columns: int = _COLUMNS) -> str:
    """Drawn plots, each with a title, under one legend (colour and label), as one self-contained file."""
    columns = max(1, min(columns, len(panels)))
    width, marks, left, top = columns * (_WIDTH + 12), list[str](), 6.0, 8.0
    for color, label in legend:
        if left > 6.0 and left + 22 + _CHARACTER * len(label) > width:
            left, top = 6.0, top + 12
        marks.append(f'<rect x="{left:g}" y="{top - 4:g}" width="9" height="3" {_fill(color)}/>')
        marks.append(_text(label, left + 12, top, anchor="start"))
        left += 22 + _CHARACTER * len(label)
    for index, (title, plot) in enumerate(panels):
        x, y = 6 + index % columns * (_WIDTH + 12), top + 20 + index // columns * (_HEIGHT + 26)
        marks.append(_text(title, x, y, "fg", _TITLE_FONT, "start"))
        marks.append(plot.replace("<svg ", f'<svg x="{x:g}" y="{y + 6:g}" width="{_WIDTH:g}" height="{_HEIGHT:g}" ', 1))
    height = top + 12 + math.ceil(len(panels) / columns) * (_HEIGHT + 26)
    return _alone(width, height, "".join(marks))


def picture_url(plots: Sequence[Plot]) -> str:
    """`picture_svg` as a `data:` URL, which a page shows without a host to fetch it from."""
    return "data:image/svg+xml;base64," + base64.b64encode(picture_svg(plots).encode()).decode()


@dataclass(frozen=True, slots=True)
class _Frame:
    """The area of the data, in pixels, and the values at its borders."""

    left: float
    top: float
    right: float
    bottom: float
    xs: Range
    ys: Range

    def x(self, value: float) -> float:
        return self.left + self.xs.share(value) * (self.right - self.left)

    def y(self, value: float) -> float:
        return self.bottom - self.ys.share(value) * (self.bottom - self.top)

    def path(self, points: Points) -> str:
        return " ".join(f"{self.x(x):.1f},{self.y(y):.1f}" for x, y in points)


def _frame(xs: Range, ys: Range, percent: bool) -> _Frame:
    longest = max(map(len, _labels(ticks(ys, 5), percent)))
    return _Frame(6 + _CHARACTER * longest, _TOP, _WIDTH - _RIGHT, _HEIGHT - _BOTTOM, xs, ys)


def _curves(plot: Plot, *, bounded: bool) -> Iterator[str]:
    """`bounded`: shares are drawn on a scale from 0 to 100 %."""
    xs = Range(-0.3, len(plot.places) - 0.7) if plot.places else spread([x for s in plot.series for x, _ in s.points])
    values = {y for line in plot.series for _, y in line.points}
    is_constant_share = len(values) == 1 and 0.0 <= min(values) <= 1.0
    ys = spread(list(values), 0.05)
    if plot.percent and (bounded or is_constant_share):
        ys = Range(0.0, 1.0)
    elif plot.exact:
        ys = Range(0.0, ys.high)
    frame = _frame(xs, ys, plot.percent)
    places = list(range(len(plot.places))) if plot.places else ticks(xs, 6, whole=True)
    yield from _axes(frame, plot.percent, plot.over, places, plot.places)
    for line in plot.series:
        yield from _line(frame, line, smoothed=not plot.exact and not plot.places)


def _line(frame: _Frame, line: Series, *, smoothed: bool) -> Iterator[str]:
    points = _thin(line.points)
    if smoothed and len(line.points) >= _SMOOTH_FROM:
        yield _polyline(frame, points, f'{_stroke(line.color, 0.8)} opacity="0.35"')
        points, width = _smooth(points), 1.8
    else:
        width = 1.7
        for x, y in points if len(points) < _MARKED_BELOW else ():
            yield f'<circle cx="{frame.x(x):.1f}" cy="{frame.y(y):.1f}" r="1.8" {_fill(line.color)}/>'
    yield _polyline(frame, points, _stroke(line.color, width))


def _band(frame: _Frame, steps: Sequence[float], estimates: Sequence[Dot]) -> Iterator[str]:
    color = estimates[0].color
    upper = list(zip(steps, (dot.high for dot in estimates), strict=True))
    lower = list(zip(steps, (dot.low for dot in estimates), strict=True))
    yield f'<polygon points="{frame.path([*upper, *reversed(lower)])}" {_fill(color)} opacity="0.18"/>'
    for step, dot in zip(steps, estimates, strict=True):
        x = f"{frame.x(step):.1f}"
        ends = f'x1="{x}" x2="{x}" y1="{frame.y(dot.low):.1f}" y2="{frame.y(dot.high):.1f}"'
        yield f'<line {ends} {_stroke(color, 1.2)} opacity="0.45"/>'
        yield f'<circle cx="{x}" cy="{frame.y(dot.value):.1f}" r="2.2" {_fill(color)}/>'
    yield _polyline(frame, list(zip(steps, (dot.value for dot in estimates), strict=True)), _stroke(color, 1.7))


def _axes(
    frame: _Frame, percent: bool, over: str, x_ticks: Sequence[float], places: Sequence[str] = ()
) -> Iterator[str]:
    y_ticks = ticks(frame.ys, 5)
    for value, label in zip(y_ticks, _labels(y_ticks, percent), strict=True):
        y = frame.y(value)
        ends = f'x1="{frame.left:.1f}" x2="{frame.right:.1f}" y1="{y:.1f}" y2="{y:.1f}"'
        yield f"<line {ends} {_stroke('grid', 0.8)}/>"
        yield _text(label, frame.left - 4, y + 3, anchor="end")
    for value, label in zip(x_ticks, places or _labels(x_ticks, False), strict=True):
        for row, line in enumerate(textwrap.wrap(label, _PLACE_CHARACTERS)):
            yield _text(line, frame.x(value), frame.bottom + 11 + 10 * row)
    if not places:
        yield _text(over, (frame.left + frame.right) / 2, frame.bottom + 22)


def _rows_frame(rows: Sequence[tuple[str, Sequence[object]]], left: float = 14.0) -> _Frame:
    height = _ROW * sum(len(entries) + 1.5 for _, entries in rows)
    return _Frame(left, 4.0, _ROWS_WIDTH - 16, 4.0 + height, Range(0.0, 1.0), Range(0.0, 1.0))


def _rows_axes(frame: _Frame, rows: Sequence[tuple[str, Sequence[object]]]) -> Iterator[str]:
    for value in (0, 0.25, 0.5, 0.75, 1.0):
        x = f"{frame.x(value):.1f}"
        yield f'<line x1="{x}" x2="{x}" y1="{frame.top:.1f}" y2="{frame.bottom:.1f}" {_stroke("grid", 0.8)}/>'
        yield _text(_label(value, True), frame.x(value), frame.bottom + 12)
    for (title, _), top in zip(rows, _row_tops(rows), strict=True):
        yield _text(title, 10.0, top + 0.6 * _ROW, "fg", _TITLE_FONT, "start")


def _row_tops(rows: Sequence[tuple[str, Sequence[object]]]) -> list[float]:
    tops, top = [], 4.0
    for _, entries in rows:
        tops.append(top)
        top += _ROW * (len(entries) + 1.5)
    return tops


def _row_heights(rows: Sequence[tuple[str, Sequence[object]]]) -> list[list[float]]:
    """The y of each entry, band by band."""
    tops = _row_tops(rows)
    return [
        [top + _ROW * (1.45 + index) for index in range(len(entries))]
        for (_, entries), top in zip(rows, tops, strict=True)
    ]


def _bar(frame: _Frame, shares: Sequence[Share], y: float) -> Iterator[str]:
    start = 0.0
    for share in shares:
        left, width = frame.x(start), frame.x(start + share.value) - frame.x(start)
        box = f'x="{left:.1f}" y="{y - 4.2:.1f}" width="{width:.1f}" height="8.4"'
        yield f'<rect {box} {_fill(share.color)} opacity="0.85"/>'
        start += share.value


def _captioned(plot: Plot) -> Iterator[str]:
    yield _text(plot.title, 0.0, 10.0, "fg", _TITLE_FONT, "start")
    left = 0.0
    for line in plot.series if [line.label for line in plot.series] != [plot.title] else ():
        yield f'<rect x="{left:g}" y="17" width="9" height="3" {_fill(line.color)}/>'
        yield _text(line.label, left + 12, 22.0, anchor="start")
        left += 22 + _CHARACTER * len(line.label)
    yield f'<g transform="translate(0,{_CAPTION - 4:g})">{"".join(_curves(plot, bounded=True))}</g>'


def _alone(width: float, height: float, content: str) -> str:
    """A picture with fixed colours on white, as a file."""
    picture = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{1.6 * width:g}" height="{1.6 * height:g}" '
        f'viewBox="0 0 {width:g} {height:g}" font-family="system-ui, \'DejaVu Sans\', sans-serif">'
        f'<rect width="100%" height="100%" fill="#ffffff"/>{content}</svg>'
    )
    return re.sub(r"var\(--(\w+)\)", lambda match: _FIXED[match[1]], picture)


def _thin(points: Points) -> list[tuple[float, float]]:
    """At most `_MAX_POINTS` points: the means of equal stretches."""
    size = math.ceil(len(points) / _MAX_POINTS)
    parts = [points[start : start + size] for start in range(0, len(points), size)]
    return [(sum(x for x, _ in part) / len(part), sum(y for _, y in part) / len(part)) for part in parts]


def _smooth(points: Points) -> list[tuple[float, float]]:
    """Running mean over a centred window of a twentieth of the points, narrower at the ends."""
    half = len(points) // 40
    windows = [points[max(0, i - half) : i + half + 1] for i in range(len(points))]
    return [(x, sum(y for _, y in window) / len(window)) for (x, _), window in zip(points, windows, strict=True)]


def _svg(name: str, width: float, height: float, marks: Sequence[str] | Iterator[str]) -> str:
    label = html.escape(name, quote=True)
    return f'<svg viewBox="0 0 {width:g} {height:.0f}" role="img" aria-label="{label}">{"".join(marks)}</svg>'


def _text(text: str, x: float, y: float, color: str = "muted", size: float = _FONT, anchor: str = "middle") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size:g}" text-anchor="{anchor}" {_fill(color)}>'
        f"{html.escape(text)}</text>"
    )


def _polyline(frame: _Frame, points: Points, style: str) -> str:
    return f'<polyline points="{frame.path(points)}" fill="none" {style}/>'


def _stroke(color: str, width: float) -> str:
    return f'style="stroke:var(--{color})" stroke-width="{width:g}"'


def _fill(color: str) -> str:
    return f'style="fill:var(--{color})"'


def _labels(values: Sequence[float], percent: bool) -> list[str]:
    """Labels of the ticks of an axis: with three digits, or as many as tell them apart."""
    texts = list[str]()
    for digits in range(3, 17):
        texts = [_label(value, percent, digits) for value in values]
        if len(set(texts)) == len(set(values)):
            break
    return texts


def _label(value: float, percent: bool, digits: int = 3) -> str:
    if percent:
        return f"{100 * value:.{digits}g} %"
    scale, unit = (1e6, "M") if abs(value) >= 1e6 else (1e3, "k") if abs(value) >= 1e3 else (1.0, "")
    return f"{value / scale:.{digits}g}{unit}"

"""Figures as SVG, drawn by matplotlib, for pages, for the Prefect UI and for files: equal input gives equal bytes.

Each is a file of its own, in fixed colours on white, which pages show as images. matplotlib is imported when something
is drawn, since stages that draw at their end import this module at their start.
"""

import base64
import io
import math
import textwrap
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas
    from matplotlib.ticker import Locator

    from luffy.statistics.accuracy import Estimate

Item = TypeVar("Item")
Points = Sequence[tuple[float, float]]
Bands = Sequence[tuple[str, Sequence[Item]]]
"""Titles, each with its entries."""
_PALETTE = {
    "fg": "#1c1e21", "muted": "#666a70", "grid": "#e6e6e2", "c1": "#2b66c9", "c2": "#d2691e", "c3": "#2e8b57",
    "c4": "#9a4fb5", "c5": "#b8960c", "c6": "#8a9199", "c7": "#b03a48",
}  # fmt: skip
"""As in `templates/page.css`, whose legends have the same colours."""
_SETTINGS: dict[Any, Any] = {
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "luffy",  # else ids differ each time
    "font.sans-serif": ["DejaVu Sans"],
    "text.parse_math": False,  # a `$` in a name is no mathematics
    "path.simplify": False,
    "font.size": 9,
    "lines.solid_capstyle": "butt",
    "text.color": _PALETTE["muted"],
    "xtick.color": _PALETTE["muted"],
    "ytick.color": _PALETTE["muted"],
    "grid.color": _PALETTE["grid"],
    "axes.axisbelow": True,
    **dict.fromkeys(("axes.spines.left", "axes.spines.right", "axes.spines.top", "axes.spines.bottom"), False),
    **dict.fromkeys(("xtick.major.size", "ytick.major.size"), 0.0),
}
_LOCK = threading.Lock()
"""matplotlib's settings are global, and a flow's publisher draws from several threads."""
_WIDTH, _HEIGHT = 288.0, 140.0
_TOP, _RIGHT, _BOTTOM = 6.0, 8.0, 26.0
_ROWS_WIDTH, _ROW = 331.0, 13.7
_CAPTION = 38.0
_CHARACTER = 5.4
"""Width of a character, on the safe side."""
_PLACE_CHARACTERS = 15
"""Longer names of places are broken into lines."""
_MAX_POINTS = 400
_SMOOTH_FROM = 30
"""Curves with fewer points are not smoothed."""
_MARKED_BELOW = 12


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a chart; points that are not finite are left out."""

    label: str
    color: str
    """Name in the palette, e.g. `c1`."""
    xs: Sequence[float]
    ys: Sequence[float]
    low: Sequence[float] = ()
    """Bounds of the intervals of `ys`; empty without intervals."""
    high: Sequence[float] = ()

    @property
    def points(self) -> list[tuple[float, float]]:
        pairs = zip(self.xs, self.ys, strict=True)
        return [(x, y) for x, y in pairs if math.isfinite(x) and math.isfinite(y)]


@dataclass(frozen=True, slots=True)
class Chart:
    """Lines over a number, or over named places."""

    title: str
    lines: Sequence[Line]
    over: str = "step"
    percent: bool = False
    """Values are shares, shown in percent."""
    exact: bool = False
    """Set, not measured: drawn without smoothing, from 0."""
    stacked: bool = False
    """Shares of the same steps, stacked to 100 %."""
    places: Sequence[str] = ()
    """Names for x = 0, 1, 2, ...; empty: x is a number."""
    span: float = 0.0
    """Not 0: a forest, whose places are rows from the top, with values around 0 from -span to span to the right."""

    @property
    def height(self) -> float:
        return _TOP + _BOTTOM + _ROW * len(self.places) if self.span else _HEIGHT


def estimates(label: str, color: str, xs: Sequence[float], found: "Sequence[Estimate]") -> Line:
    """Estimates over `xs`, with their intervals."""
    return Line(label, color, xs, *([getattr(each, name) for each in found] for name in ("value", "low", "high")))


def chart(drawn: Chart) -> str:
    """The lines alone, without title and legend.

    A long line is faint, with a running mean on top; one with intervals has them as a band, or at named places as bars.
    """
    with _canvas(_WIDTH, drawn.height) as canvas:
        _draw(canvas, drawn, 0.0, 0.0, bounded=False)
        return _svg(canvas)


def dots(bands: "Bands[tuple[str, Estimate, Sequence[float]]]") -> str:
    """Estimates with their intervals, each (colour, estimate, value of each seed), from 0 to 100 %, in titled bands."""
    with _banded(bands, left=14.0) as (canvas, axes, entries):
        for y, (color, found, by_seed) in entries:
            axes.plot([found.low, found.high], [y, y], color=_PALETTE[color], lw=2.4, alpha=0.55, clip_on=False)
            axes.plot([found.value], [y], "o", color=_PALETTE[color], ms=6, mew=0, clip_on=False)
            if len(by_seed) > 1:
                at = [y - 0.22] * len(by_seed)
                axes.plot(by_seed, at, "o", color=_PALETTE[color], ms=2.5, mew=0, alpha=0.8, clip_on=False)
        return _svg(canvas)


def bars(bands: Bands[tuple[str, Sequence[tuple[str, float]]]]) -> str:
    """Bars of shares beside each other, each (colour, share), a labelled bar to a line, in titled bands."""
    longest = max((len(label) for _, found in bands for label, _ in found), default=0)
    with _banded(bands, left=8 + _CHARACTER * longest) as (canvas, axes, entries):
        for y, (label, shares) in entries:
            start = 0.0
            axes.annotate(label, (0, y), (-5, 0), textcoords="offset points", ha="right", va="center")
            for color, share in shares:
                axes.barh(y, share, 0.61, start, color=_PALETTE[color], alpha=0.85, lw=0, clip_on=False)
                start += share
        return _svg(canvas)


def picture(charts: Sequence[Chart]) -> str:
    """Charts with titles and legends in a grid; those without a point are left out."""
    drawn = [each for each in charts if any(line.points for line in each.lines)]
    columns, tallest = min(2, max(len(drawn), 1)), max((each.height for each in drawn), default=_HEIGHT)
    cell = tallest + _CAPTION
    with _canvas(columns * (_WIDTH + 12), 4 + math.ceil(len(drawn) / columns) * cell) as canvas:
        for index, each in enumerate(drawn):
            x, y = 6 + index % columns * (_WIDTH + 12), 4 + index // columns * cell
            _write(canvas, each.title, x, y + 12, ha="left", color=_PALETTE["fg"], size=10)
            lines, at = [line for line in each.lines if line.points], x
            for line in lines if [line.label for line in lines] != [each.title] else ():
                _swatch(canvas, line.color, line.label, at, y + 24)
                at += 22 + _CHARACTER * len(line.label)
            _draw(canvas, each, x, y + (18 if each.span else _CAPTION), bounded=True)
        return _svg(canvas)


def image_url(svg: str) -> str:
    """A figure as a `data:` URL, which a page shows without a host to fetch it from."""
    return "data:image/svg+xml;base64," + base64.b64encode(svg.encode()).decode()


def _draw(canvas: "Canvas", drawn: Chart, x: float, y: float, *, bounded: bool) -> None:
    """Draw into the rectangle at (x, y); `bounded`: shares without intervals are on a scale from 0 to 100 %."""
    from matplotlib.ticker import MaxNLocator

    lines = [line for line in drawn.lines if line.points]
    if drawn.span:
        _forest(canvas, drawn, lines, x, y)
        return
    axes = _axes(canvas, x + 6, y + _TOP, x + _WIDTH - _RIGHT, y + _HEIGHT - _BOTTOM)
    axes.margins(x=0.02 if any(line.low for line in lines) else 0, y=0.05)
    if drawn.stacked:
        _stack(axes, lines)
    for number, line in enumerate(() if drawn.stacked else lines):
        # Beside each other, so that no interval hides another.
        shift = 0.035 * (number - (len(lines) - 1) / 2) if drawn.places and line.low else 0.0
        _line(axes, line, shift, smooth=not (drawn.exact or drawn.places), with_band=not drawn.places)
    values = {value for line in lines for _, value in line.points}
    intervals = any(line.low for line in lines)
    constant = len(values) == 1 and 0 <= min(values) <= 1
    if drawn.stacked or (drawn.percent and not intervals and (bounded or constant)):
        axes.set_ylim(0, 1)
    elif drawn.exact:
        axes.set_ylim(bottom=0)
    steps = (1, 2, 2.5, 5, 10)
    ys = _inside(MaxNLocator(5, steps=steps), axes.get_ylim())
    labels = _labels(ys, drawn.percent)
    axes.set_yticks(ys, labels)
    if drawn.places:
        axes.set_xlim(-0.3, len(drawn.places) - 0.7)
        names = ["\n".join(textwrap.wrap(place, _PLACE_CHARACTERS)) for place in drawn.places]
        axes.set_xticks(range(len(names)), names)
    else:
        few = lines[0].xs if len(lines) == 1 and lines[0].low and len(lines[0].xs) <= 8 else None
        xs = few or _inside(MaxNLocator(6, steps=steps, integer=True), axes.get_xlim())
        axes.set_xticks(xs, _labels(xs, False))
    left = x + 6 + _CHARACTER * max(map(len, labels), default=1)
    axes.set_position(_place(canvas, left, y + _TOP, x + _WIDTH - _RIGHT, y + _HEIGHT - _BOTTOM))
    axes.grid(axis="y", lw=0.8, clip_on=False)
    _write(canvas, drawn.over, (left + x + _WIDTH - _RIGHT) / 2, y + _HEIGHT - 4)


def _forest(canvas: "Canvas", drawn: Chart, lines: Sequence[Line], x: float, y: float) -> None:
    from matplotlib.ticker import MaxNLocator

    left, right, bottom = x + 12 + _CHARACTER * max(map(len, drawn.places)), x + _WIDTH - _RIGHT, y + drawn.height
    axes = _axes(canvas, left, y + _TOP, right, bottom - _BOTTOM)
    axes.set(xlim=(-drawn.span, drawn.span), ylim=(len(drawn.places) - 0.5, -0.5))
    for line in lines:
        axes.hlines(line.xs, line.low, line.high, color=_PALETTE[line.color], lw=1.6, alpha=0.6)
        axes.plot(line.ys, line.xs, "o", color=_PALETTE[line.color], ms=4.8, mew=0)
    ticks = _inside(MaxNLocator(8, steps=(1, 2, 2.5, 5, 10)), axes.get_xlim())
    axes.set_xticks(ticks, _labels([100 * tick for tick in ticks], False))
    axes.set_yticks(range(len(drawn.places)), drawn.places)
    axes.grid(axis="x", lw=0.8)
    axes.axvline(0, color=_PALETTE["muted"], lw=0.8, zorder=0.5)
    _write(canvas, drawn.over, (left + right) / 2, bottom - 4)


def _line(axes: "Axes", line: Line, shift: float, *, smooth: bool, with_band: bool) -> None:
    color, points = _PALETTE[line.color], _thin(line.points)
    if line.low:
        xs = [x + shift for x in line.xs]
        if with_band:
            edge = [*line.high, *reversed(line.low)]
            axes.fill([*xs, *reversed(xs)], edge, color=color, alpha=0.18, lw=0, clip_on=False)
        axes.vlines(xs, line.low, line.high, color=color, lw=1.2, alpha=0.45, clip_on=False)
        axes.plot(xs, line.ys, "o-", color=color, ms=4.4, mew=0, lw=1.6, clip_on=False)
        return
    is_long = smooth and len(line.points) >= _SMOOTH_FROM
    if is_long:
        axes.plot(*zip(*points, strict=True), color=color, lw=0.8, alpha=0.35, clip_on=False)
        points = _smooth(points)
    mark = "o-" if len(points) < _MARKED_BELOW else "-"
    axes.plot(*zip(*points, strict=True), mark, color=color, ms=3.6, mew=0, lw=1.8 if is_long else 1.7, clip_on=False)


def _stack(axes: "Axes", lines: Sequence[Line]) -> None:
    smooth = [_smooth(_thin(line.points)) for line in lines]
    xs = [x for x, _ in smooth[0]]
    if len(xs) == 1:  # a single point has no width
        xs, smooth = [xs[0] - 0.5, xs[0] + 0.5], [2 * points for points in smooth]
    below = [0.0] * len(xs)
    for line, points in zip(lines, smooth, strict=True):
        above = [low + y for low, (_, y) in zip(below, points, strict=True)]
        edge = [*above, *reversed(below)]
        axes.fill([*xs, *reversed(xs)], edge, color=_PALETTE[line.color], alpha=0.85, lw=0, clip_on=False)
        below = above


@contextmanager
def _banded(bands: Bands[Item], left: float) -> "Iterator[tuple[Canvas, Axes, list[tuple[float, Item]]]]":
    """A canvas with axes from 0 to 100 % and the bands' titles, and each entry with its y; a unit of y is a row.

    Rows count from the top; a title takes one and a half.
    """
    num_rows = sum(len(found) + 1.5 for _, found in bands)
    with _canvas(_ROWS_WIDTH, 24.0 + _ROW * num_rows) as canvas:
        axes, ticks = _axes(canvas, left, 4.0, _ROWS_WIDTH - 16, canvas.bbox.height - 20), (0, 0.25, 0.5, 0.75, 1.0)
        axes.set(xlim=(0, 1), ylim=(num_rows, 0))
        axes.set_xticks(ticks, _labels(ticks, True))
        axes.set_yticks([])
        axes.grid(axis="x", lw=0.8, clip_on=False)
        top, entries = 0.0, list[tuple[float, Item]]()
        for title, found in bands:
            _write(canvas, title, 10.0, 4 + _ROW * (top + 0.6), ha="left", color=_PALETTE["fg"], size=10)
            entries += ((top + 1.45 + index, entry) for index, entry in enumerate(found))
            top += len(found) + 1.5
        yield canvas, axes, entries


def _swatch(canvas: "Canvas", color: str, label: str, x: float, y: float) -> None:
    from matplotlib.patches import Rectangle

    canvas.add_artist(Rectangle((x, canvas.bbox.height - y + 1), 9, 3, color=_PALETTE[color], lw=0, transform=None))
    _write(canvas, label, x + 12, y, ha="left")


def _write(canvas: "Canvas", text: str, x: float, y: float, ha: str = "center", **style: Any) -> None:
    """Text whose baseline is at (x, y), in points from the upper left."""
    canvas.text(x / canvas.bbox.width, 1 - y / canvas.bbox.height, " ".join(text.split()), ha=ha, **style)


def _axes(canvas: "Canvas", left: float, top: float, right: float, bottom: float) -> "Axes":
    return canvas.add_axes(_place(canvas, left, top, right, bottom), facecolor="none")


def _place(canvas: "Canvas", left: float, top: float, right: float, bottom: float) -> tuple[float, float, float, float]:
    width, height = canvas.bbox.width, canvas.bbox.height
    return left / width, 1 - bottom / height, (right - left) / width, (bottom - top) / height


@contextmanager
def _canvas(width: float, height: float) -> "Iterator[Canvas]":
    """A figure of that size in points, under our settings alone."""
    import matplotlib
    from matplotlib.figure import Figure as Canvas

    with _LOCK, matplotlib.rc_context(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font")  # it only measures text; the browser draws it
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_SETTINGS)
        yield Canvas(figsize=(width / 72, height / 72), dpi=72, facecolor="white")


def _svg(canvas: "Canvas") -> str:
    file = io.StringIO()
    canvas.savefig(file, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    return file.getvalue()


def _inside(locator: "Locator", shown: tuple[float, float]) -> list[float]:
    """Round numbers in the range that is shown."""
    low, high = shown
    room = 1e-9 * (high - low)
    return [float(tick) for tick in locator.tick_values(low, high) if low - room <= tick <= high + room]


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


def _labels(values: Sequence[float], percent: bool) -> list[str]:
    """Labels of the ticks of an axis: with three digits, or as many as tell them apart."""
    scaled = [
        (100 * value, " %") if percent
        else (value / 1e6, "M") if abs(value) >= 1e6
        else (value / 1e3, "k") if abs(value) >= 1e3
        else (value, "")
        for value in values
    ]  # fmt: skip
    texts = list[str]()
    for digits in range(3, 17):
        texts = [f"{number:.{digits}g}{unit}" for number, unit in scaled]
        if len(set(texts)) == len(set(values)):
            break
    return texts

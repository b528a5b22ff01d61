"""Inline SVG plots: the same input gives the same bytes, and colours come from the page's style sheet.

Matplotlib draws with stand-in colours that become CSS variables (`var(--c1)`), so that one figure serves light and
dark; text stays text, in the page's font.
"""

import html
import io
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

_ROLES = ("fg", "muted", "grid", "c1", "c2", "c3", "c4", "c5", "c6", "c7")
_STAND_INS = {role: f"#fe{index:02x}fe" for index, role in enumerate(_ROLES)}
_MAX_POINTS = 400
_SMOOTH_FROM = 30
"""Curves of fewer steps are shown as they are."""
_MAX_TICKS = 8
_CURVE_SIZE = (4.0, 1.95)
_ROW_WIDTH = 4.6


@dataclass(frozen=True, slots=True)
class Series:
    """One line of a curve plot."""

    label: str
    color: str
    """Name of a CSS variable, e.g. `c1`."""
    steps: Sequence[float]
    values: Sequence[float]


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


def curve_plot(
    name: str, series: Sequence[Series], *, percent: bool = False, exact: bool = False, over: str = "step"
) -> str:
    """Lines over steps, or what `over` says.

    Long ones are faint with a running mean on top, unless they are `exact`, which start at 0.
    """
    with _figure(name, *_CURVE_SIZE) as (axes, svg):
        for line in series:
            _draw_line(axes, line, exact)
        _curve_axes(axes, percent, over)
        if exact:
            axes.set_ylim(bottom=0)
    return svg.getvalue()


def band_plot(name: str, steps: Sequence[float], estimates: Sequence[Dot]) -> str:
    """Estimates over steps, in one colour, with their intervals as a band."""
    with _figure(name, *_CURVE_SIZE) as (axes, svg):
        color = _STAND_INS[estimates[0].color]
        lows, highs = [dot.low for dot in estimates], [dot.high for dot in estimates]
        axes.fill_between(steps, lows, highs, color=color, alpha=0.18, linewidth=0)
        axes.vlines(steps, lows, highs, color=color, alpha=0.45, linewidth=1.2)
        axes.plot(steps, [dot.value for dot in estimates], color=color, linewidth=1.7, marker="o", markersize=4)
        _curve_axes(axes, percent=True)
        if len(steps) <= _MAX_TICKS:
            axes.set_xticks(list(steps))
    return svg.getvalue()


def stacked_plot(name: str, series: Sequence[Series]) -> str:
    """Shares over steps, stacked to 100 %."""
    with _figure(name, *_CURVE_SIZE) as (axes, svg):
        lines = [_smooth(*_thin(line.steps, line.values)) for line in series]
        colors = [_STAND_INS[line.color] for line in series]
        axes.stackplot(lines[0][0], *(values for _, values in lines), colors=colors, linewidth=0, alpha=0.85)
        axes.set_ylim(0, 1)
        _curve_axes(axes, percent=True)
        axes.set_xlim(lines[0][0][0], lines[0][0][-1])
    return svg.getvalue()


def dot_plot(name: str, rows: Sequence[tuple[str, Sequence[Dot]]]) -> str:
    """Estimates with their intervals on a scale from 0 to 100 %, a band a row."""
    with _rows(name, rows) as (axes, svg, places):
        for (_, dots), ys in zip(rows, places, strict=True):
            for dot, y in zip(dots, ys, strict=True):
                color = _STAND_INS[dot.color]
                axes.plot([dot.low, dot.high], [y, y], color=color, linewidth=2.4, alpha=0.55, solid_capstyle="round")
                axes.plot([dot.value], [y], "o", color=color, markersize=6)
    return svg.getvalue()


def bar_plot(name: str, rows: Sequence[tuple[str, Sequence[tuple[str, Sequence[Share]]]]]) -> str:
    """Stacked shares, a labelled bar each, in bands."""
    bands = [(title, bars) for title, bars in rows]
    with _rows(name, bands, left=0.11) as (axes, svg, places):
        for (_, bars), ys in zip(bands, places, strict=True):
            for (label, shares), y in zip(bars, ys, strict=True):
                _draw_bar(axes, label, shares, y)
    return svg.getvalue()


def _draw_bar(axes: Axes, label: str, shares: Sequence[Share], y: float) -> None:
    axes.text(-0.015, y, label, ha="right", va="center", color=_STAND_INS["muted"], fontsize=9)
    start = 0.0
    for share in shares:
        axes.barh(y, share.value, left=start, height=0.62, color=_STAND_INS[share.color], alpha=0.85, linewidth=0)
        start += share.value


def _draw_line(axes: Axes, line: Series, exact: bool) -> None:
    color = _STAND_INS[line.color]
    steps, values = _thin(line.steps, line.values)
    if exact or len(line.values) < _SMOOTH_FROM:
        axes.plot(steps, values, color=color, linewidth=1.7, marker="o" if len(values) < 12 else "", markersize=3)
        return
    axes.plot(steps, values, color=color, linewidth=0.8, alpha=0.35)
    axes.plot(*_smooth(steps, values), color=color, linewidth=1.8)


def _thin(steps: Sequence[float], values: Sequence[float]) -> tuple[list[float], list[float]]:
    """At most `_MAX_POINTS` points: the means of equal stretches."""
    size = math.ceil(len(steps) / _MAX_POINTS)
    starts = range(0, len(steps), size)
    return (
        [sum(steps[i : i + size]) / len(steps[i : i + size]) for i in starts],
        [sum(values[i : i + size]) / len(values[i : i + size]) for i in starts],
    )


def _smooth(steps: Sequence[float], values: Sequence[float]) -> tuple[list[float], list[float]]:
    """Running mean over a centred window of a twentieth of the points (at the ends, of what there is of it)."""
    half = len(values) // 40
    windows = [values[max(0, i - half) : i + half + 1] for i in range(len(values))]
    return list(steps), [sum(window) / len(window) for window in windows]


def _curve_axes(axes: Axes, percent: bool, over: str = "step") -> None:
    axes.set_xlabel(over, color=_STAND_INS["muted"], fontsize=9, labelpad=1)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(5))
    axes.margins(x=0.01)
    axes.yaxis.set_major_formatter(FuncFormatter(_percent if percent else _plain))


def _percent(value: float, _: object) -> str:
    return f"{100 * value:.3g} %"


def _plain(value: float, _: object) -> str:
    return f"{value:.3g}" if abs(value) < 1000 else f"{value / 1000:.3g}k"


@contextmanager
def _figure(name: str, width: float, height: float) -> Iterator[tuple[Axes, io.StringIO]]:
    """Axes to draw on; afterwards the stream holds the SVG."""
    svg = io.StringIO()
    with mpl.rc_context(
        {
            "svg.fonttype": "none",
            "svg.hashsalt": name,  # ids are unique on the page and the same in every run
            "text.parse_math": False,  # names of suites are text
            "font.family": "DejaVu Sans",
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.spines.left": False,
        }
    ):
        figure = Figure(figsize=(width, height), layout="constrained")
        figure.patch.set_alpha(0)
        axes = figure.add_subplot()
        axes.patch.set_alpha(0)
        axes.grid(axis="y", color=_STAND_INS["grid"], linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines["bottom"].set_color(_STAND_INS["grid"])
        axes.tick_params(colors=_STAND_INS["muted"], labelsize=9, length=0, pad=3)
        yield axes, svg
        raw = io.StringIO()
        figure.savefig(raw, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    svg.write(_inline(raw.getvalue(), name))


@contextmanager
def _rows(
    name: str, rows: Sequence[tuple[str, Sequence[object]]], left: float = 0.0
) -> Iterator[tuple[Axes, io.StringIO, list[list[float]]]]:
    """Horizontal axes from 0 to 100 % with titled bands; yields the heights of each band's entries."""
    heights = [len(entries) + 1.5 for _, entries in rows]
    total = sum(heights)
    places: list[list[float]] = []
    with _figure(name, _ROW_WIDTH, 0.19 * total + 0.4) as (axes, svg):
        top = 0.0
        for (title, entries), height in zip(rows, heights, strict=True):
            axes.text(-left, top + 0.35, title, ha="left", va="center", color=_STAND_INS["fg"], fontsize=10)
            places.append([top + 1.25 + index for index in range(len(entries))])
            top += height
        axes.set_ylim(total - 0.2, -0.3)
        axes.set_xlim(-left - 0.015, 1.015)
        axes.set_yticks([])
        axes.grid(visible=False, axis="y")
        axes.grid(visible=True, axis="x", color=_STAND_INS["grid"], linewidth=0.8)
        axes.set_xticks([0, 0.25, 0.5, 0.75, 1.0])
        axes.xaxis.set_major_formatter(FuncFormatter(_percent))
        yield axes, svg, places


def _inline(svg: str, name: str) -> str:
    """The SVG element alone, scaled by the page, coloured and set in type by its style sheet."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>", "", svg, flags=re.DOTALL)  # it would rule the whole page
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)  # names of matplotlib's own, the same in every figure
    svg = svg.replace("font-family: 'DejaVu Sans'; ", "")
    svg = re.sub(r"font: ([\d.]+)px [^;\"]*", r"font-size: \1px", svg)
    for role, stand_in in _STAND_INS.items():
        svg = svg.replace(stand_in, f"var(--{role})")
    head = re.search(r'viewBox="[^"]*"', svg)
    assert head is not None
    body = svg[svg.index(">") + 1 :].strip()
    return (
        f'<svg {head[0]} xmlns:xlink="http://www.w3.org/1999/xlink" role="img" aria-label="{html.escape(name)}">{body}'
    )

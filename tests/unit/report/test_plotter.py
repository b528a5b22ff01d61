"""Plots as SVG: what is drawn, what is left out, and that names are text."""

import xml.etree.ElementTree as ElementTree

import pytest
from synthetic.finished_chain import HOSTILE

from luffy.report.panels import draw_panels, rl_panels
from luffy.report.plotter import (
    Dot,
    Plot,
    Series,
    Share,
    band_plot,
    bands_plot,
    bar_plot,
    colored,
    curve_plot,
    dot_plot,
    picture_svg,
    stacked_plot,
)
from luffy.report.scales import Range, spread, ticks

SVG = "{http://www.w3.org/2000/svg}"


def words(svg: ElementTree.Element) -> list[str | None]:
    return [text.text for text in svg.iter() if text.tag.endswith("text")]


def lines(svg: str) -> list[list[tuple[float, float]]]:
    """The points of each polyline."""
    drawn = (line for line in ElementTree.fromstring(svg).iter() if line.tag.endswith("polyline"))
    return [[tuple(map(float, pair.split(","))) for pair in line.attrib["points"].split()] for line in drawn]


def test_points_that_are_not_finite_and_plots_without_any_are_left_out() -> None:
    nan, inf = float("nan"), float("inf")
    svg = picture_svg([
        Plot("a", colored({"a": [(1, 2.0), (2, nan), (3, 4.0)]})), Plot("b", colored({"b": [(1, inf)]}))
    ])  # fmt: skip
    (line,) = lines(svg)
    assert len(line) == 2
    assert "b" not in words(ElementTree.fromstring(svg))


def test_a_long_curve_is_thinned_and_a_constant_one_is_drawn() -> None:
    long, flat = [(x, float(x)) for x in range(10_000)], [(0, 0.0), (1, 0.0)]
    faint, mean, constant = lines(picture_svg([Plot("x", colored({"a": long})), Plot("y", colored({"b": flat}))]))
    assert len(faint) == len(mean) <= 400
    assert len(constant) == 2


def test_curves_and_shares_of_a_single_step_are_drawn() -> None:
    dot = Dot("c1", 0.5, 0.4, 0.6)
    assert bands_plot("a", [([0.0], [dot]), ([0.0], [dot])], "steps").count("<circle") == 2
    svg = ElementTree.fromstring(stacked_plot("b", [Series("x", "c1", [1], [0.4]), Series("y", "c2", [1], [0.6])]))
    for polygon in svg.iter("polygon"):
        corners = [tuple(map(float, pair.split(","))) for pair in polygon.attrib["points"].split()]
        assert len({x for x, _ in corners}) == 2
    assert len(list(svg.iter("polygon"))) == 2


@pytest.mark.parametrize(
    ("values", "percent", "expected"),
    [
        ([1201, 1204, 1209], False, ["1.202k", "1.204k", "1.206k", "1.208k"]),
        ([0.9561, 0.9567], True, ["95.62 %", "95.64 %", "95.66 %"]),
        ([1e6, 2e6], False, ["1M", "1.25M", "1.5M", "1.75M", "2M"]),
        ([10, 20], False, ["10", "12.5", "15", "17.5", "20"]),
    ],
)
def test_ticks_have_different_labels(values: list[float], percent: bool, expected: list[str]) -> None:
    svg = curve_plot("x", [Series("a", "c1", [1, 2, 3][: len(values)], values)], percent=percent)
    assert words(ElementTree.fromstring(svg))[: len(expected)] == expected


def test_rewards_outside_0_to_1_are_not_shown_in_percent() -> None:
    rows = [{"step": 1, "reward/mean": -1.0}, {"step": 2, "reward/mean": 1.0}]
    (figure, *_) = draw_panels("rl", rl_panels(()), rows)
    assert not [word for word in words(ElementTree.fromstring(figure.svg)) if "%" in (word or "")]


@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_a_share_that_never_changes_is_drawn_from_0_to_100_percent(share: float) -> None:
    shown = words(ElementTree.fromstring(curve_plot("c", [Series("a", "c1", [1, 2, 3], [share] * 3)], percent=True)))
    assert {"0 %", "100 %"} <= {*shown} and "-100 %" not in shown


def test_names_in_a_picture_are_text() -> None:
    svg = ElementTree.fromstring(picture_svg([Plot(HOSTILE, colored({"a": [(0, 1.0)]}))]))
    assert HOSTILE in words(svg)


def test_a_picture_stands_alone_and_a_plot_follows_the_style_of_its_page() -> None:
    assert "var(" not in picture_svg([Plot("x", colored({"a": [(0, 1.0), (1, 2.0)]}))])
    assert "var(--c2)" in curve_plot("x", [Series("a", "c2", [0, 1], [1.0, 2.0])])


def test_a_curve_goes_from_the_lower_left_to_the_upper_right() -> None:
    (line,) = lines(curve_plot("x", [Series("a", "c1", [0, 10], [1.0, 2.0])]))
    (x0, y0), (x1, y1) = line
    assert x0 < x1
    assert y0 > y1  # pixels grow downwards


def test_every_mark_lies_inside_the_picture() -> None:
    dots = [Dot("c1", 0.0, 0.0, 0.2), Dot("c2", 1.0, 0.9, 1.0)]
    shares = [("base", [Share("c1", 0.25), Share("c2", 0.75)])]
    drawn = (
        dot_plot("a", [("suite", dots)]),
        bar_plot("b", [("suite", shares)]),
        band_plot("c", [10, 20], dots),
        stacked_plot("d", [Series("x", "c1", [1, 2], [0.4, 0.6]), Series("y", "c2", [1, 2], [0.6, 0.4])]),
    )
    for svg in map(ElementTree.fromstring, drawn):
        width, height = map(float, svg.attrib["viewBox"].split()[2:])
        for mark in svg.iter():
            for name, most in (("x", width), ("cx", width), ("x2", width), ("y", height), ("cy", height)):
                assert 0 <= float(mark.attrib.get(name, 0)) <= most


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.0, 1.0, [0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (1, 200, [50, 100, 150, 200]),
        (-1e-7, 3e-7, [-1e-7, 0, 1e-7, 2e-7, 3e-7]),
    ],
)
def test_ticks_are_round_numbers_inside_the_range(low: float, high: float, expected: list[float]) -> None:
    assert ticks(Range(low, high), 5) == pytest.approx(expected, abs=1e-12)


def test_steps_have_whole_ticks_and_a_constant_has_room() -> None:
    assert ticks(Range(1, 3), 6, whole=True) == [1, 2, 3]
    assert spread([5.0, 5.0]) == Range(4.75, 5.25)

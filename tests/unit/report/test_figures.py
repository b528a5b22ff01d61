"""Figures as SVG: what is drawn, what is left out, and that names are text."""

import re
import threading
import xml.etree.ElementTree as ElementTree

import pytest
from synthetic.finished_chain import HOSTILE
from synthetic.settings import rl_settings

from luffy.report.curves import draw_panels, rl_panels
from luffy.report.figures import Chart, Line, bars, chart, dots, estimates, picture
from luffy.statistics.accuracy import Estimate

NAMES = ("$x$ _y", HOSTILE, "_begins", "模型")
LOW, HIGH = Estimate(0.0, 0.0, 0.2, "", 9), Estimate(1.0, 0.9, 1.0, "", 9)


def colored(curves: dict[str, list[tuple[float, float]]]) -> list[Line]:
    return [Line(label, "c1", *zip(*points, strict=True)) for label, points in curves.items()]


def words(svg: str) -> list[str | None]:
    return [text.text for text in ElementTree.fromstring(svg).iter() if text.tag.endswith("text")]


def lines(svg: str) -> list[list[tuple[float, float]]]:
    """The points of each line that is no grid line."""
    paths = [each.attrib for each in ElementTree.fromstring(svg).iter() if each.tag.endswith("path")]
    drawn = (each["d"] for each in paths if re.search("fill: none; stroke: (?!#e6e6e2)", each.get("style", "")))
    return [[tuple(map(float, pair.split())) for pair in re.split("[ML]", path)[1:]] for path in drawn]


def over(values: list[float], **options) -> str:
    return chart(Chart("x", [Line("a", "c1", range(1, len(values) + 1), values)], **options))


def test_a_long_curve_is_thinned_and_points_that_are_not_finite_and_charts_without_any_are_left_out():
    nan, inf = float("nan"), float("inf")
    svg = picture([Chart("a", colored({"a": [(1, 2.0), (2, nan), (3, 4.0)]})), Chart("b", colored({"b": [(1, inf)]}))])
    (line,) = lines(svg)
    assert len(line) == 2 and "b" not in words(svg)
    long, flat = [(x, float(x)) for x in range(10_000)], [(0, 0.0), (1, 0.0)]
    faint, mean, constant = lines(picture([Chart("x", colored({"a": long})), Chart("y", colored({"b": flat}))]))
    assert len(faint) == len(mean) <= 400
    assert len(constant) == 2


def test_curves_and_shares_of_a_single_step_are_drawn():
    band = estimates("a", "c1", [0.0], [Estimate(0.5, 0.4, 0.6, "", 9)])
    assert chart(Chart("a", [band, band], percent=True)).count("<use") == 2
    shares = chart(Chart("b", [Line("x", "c1", [1], [0.4]), Line("y", "c2", [1], [0.6])], stacked=True))
    areas = re.findall(r'd="([^"]*)\sz\s" style="fill: #(?!f{6})', shares)
    assert len(areas) == 2 and all(len(set(re.findall(r"[ML] ([\d.]+) ", area))) == 2 for area in areas)


@pytest.mark.parametrize(
    ("values", "percent", "expected"),
    [
        ([1201, 1204, 1209], False, ["1.202k", "1.204k", "1.206k", "1.208k"]),
        ([0.9561, 0.9567], True, ["95.62 %", "95.64 %", "95.66 %"]),
        ([1e6, 2e6], False, ["1M", "1.25M", "1.5M", "1.75M", "2M"]),
        ([10, 20], False, ["10", "12.5", "15", "17.5", "20"]),
    ],
)
def test_ticks_have_different_labels(values, percent, expected):
    assert set(expected) <= set(words(over(values, percent=percent)))


@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_axes_have_whole_steps_and_shares_from_0_to_100_percent(share):
    assert words(over([0.1, 0.2, 0.3]))[:3] == ["1", "2", "3"]
    shown = words(over([share] * 3, percent=True))
    assert {"0 %", "100 %"} <= {*shown} and "-100 %" not in shown
    rewards = [{"step": 1, "reward/mean": -1.0}, {"step": 2, "reward/mean": 1.0}]
    (figure, *_) = draw_panels(rl_panels(rl_settings().objective), rewards)
    assert not [word for word in words(figure.svg) if "%" in (word or "")]


def test_what_is_set_is_drawn_from_0_and_without_smoothing():
    rates = [1e-4 + 1e-6 * step for step in range(50)]
    assert len(lines(over(rates, exact=True))) == 1 and "0" in words(over(rates, exact=True))
    assert len(lines(over(rates))) == 2


@pytest.mark.parametrize("name", NAMES)
def test_names_are_text_wherever_they_stand(name):
    line = estimates(name, "c1", [0], [HIGH])
    drawn = (
        picture([Chart(name, colored({name: [(0, 1.0)], "b": [(0, 1.0)]}))]),
        picture([Chart("x", [line], places=[name], span=1.0)]),
        dots([(name, [("c1", LOW, ())])]),
        bars([("suite", [(name, [("c1", 1.0)])])]),
    )
    for svg in drawn:
        assert " ".join(name.split()) in words(svg)


def test_a_figure_has_fixed_colours_on_white_and_needs_nothing_else():
    for svg in (over([1.0, 2.0]), picture([Chart("x", colored({"a": [(0, 1.0), (1, 2.0)]}))])):
        assert '" style="fill: #ffffff"/>' in svg and not re.search("var\\(|<metadata|<image|<script", svg)
        assert all(target.startswith("#") for target in re.findall(r'(?:href="|url\()([^)"]*)', svg))


def test_a_curve_goes_from_the_lower_left_to_the_upper_right():
    (line,) = lines(over([1.0, 2.0]))
    (x0, y0), (x1, y1) = line
    assert x0 < x1
    assert y0 > y1  # pixels grow downwards


def test_threads_and_the_settings_of_others_change_no_byte():
    import matplotlib

    found, wanted = list[str](), over([1.0, 3.0, 2.0])
    with matplotlib.rc_context({"font.size": 30, "axes.facecolor": "black", "text.parse_math": True}):
        threads = [threading.Thread(target=lambda: found.append(over([1.0, 3.0, 2.0]))) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert matplotlib.rcParams["font.size"] == 30
    assert found == [wanted] * 4

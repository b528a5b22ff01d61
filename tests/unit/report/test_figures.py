"""Figures as SVG: what is drawn, what is left out, and that names are text; the page of an evaluation says all that its
results say, alone in one file."""

import re
import xml.etree.ElementTree as ElementTree
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from synthetic.finished_chain import HOSTILE
from synthetic.pages import stands_alone
from synthetic.result_rows import result_row, sample_record
from synthetic.settings import rl_settings

from luffy.evaluation.results import EvaluationResults, ResultRow, SamplingProtocol
from luffy.report.curves import draw_panels, rl_panels
from luffy.report.evaluation_page import evaluation_page
from luffy.report.figures import Chart, Line, bars, chart, dots, estimates, picture
from luffy.report.page import html, markdown
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


def test_a_long_curve_is_thinned_what_is_set_is_drawn_from_0_and_points_that_are_not_finite_are_left_out():
    nan, inf = float("nan"), float("inf")
    svg = picture([Chart("a", colored({"a": [(1, 2.0), (2, nan), (3, 4.0)]})), Chart("b", colored({"b": [(1, inf)]}))])
    (((x0, y0), (x1, y1)),) = lines(svg)
    assert x0 < x1 and y0 > y1, "from the lower left to the upper right: pixels grow downwards"
    assert "b" not in words(svg), "a chart without any point"
    long, flat = [(x, float(x)) for x in range(10_000)], [(0, 0.0), (1, 0.0)]
    faint, mean, constant = lines(picture([Chart("x", colored({"a": long})), Chart("y", colored({"b": flat}))]))
    assert len(faint) == len(mean) <= 400
    assert len(constant) == 2
    rates = [1e-4 + 1e-6 * step for step in range(50)]
    assert len(lines(over(rates, exact=True))) == 1 and "0" in words(over(rates, exact=True))
    assert len(lines(over(rates))) == 2


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


def test_threads_and_the_settings_of_others_change_no_byte():
    import matplotlib

    wanted, many = over([1.0, 3.0, 2.0]), 4
    with (
        matplotlib.rc_context({"font.size": 30, "axes.facecolor": "black", "text.parse_math": True}),
        ThreadPoolExecutor(many) as threads,
    ):
        assert [*threads.map(over, [[1.0, 3.0, 2.0]] * many)] == [wanted] * many
        assert matplotlib.rcParams["font.size"] == 30


# The page of an evaluation.

RECORD = sample_record(
    "math", "a", decoding="hot & <b>", num_tokens=4, grader="math",
    subject="<i>Algebra</i> | $x$", level="3",
)  # fmt: skip
WRONG = replace(RECORD, uid="b", correct=False, outcome="no_answer", answer=None, finish_reason="length", level="4")
PROTOCOL = SamplingProtocol(
    template="r1_zero", temperature=0.6, top_p=1.0, max_response_tokens=64, stop=("</answer>",), engine="vllm"
)


def rows() -> list[ResultRow]:
    sampled = [replace(record, sample=sample) for record in (RECORD, WRONG) for sample in range(2)]
    choice = replace(RECORD, suite="arc", grader="choice", num_options=4, subject=None, level=None)
    return [result_row(sampled, 0.9, PROTOCOL), result_row([choice, replace(choice, uid="b")], 0.9)]


def written(found: list[ResultRow]) -> tuple[str, str]:
    page = evaluation_page(EvaluationResults(checkpoint="rl", confidence=0.9, rows=tuple(found)))
    return html(page), markdown(page)


def line(page: str, *beginning: str) -> list[str]:
    """The cells of the one table line that begins so."""
    (found,) = [text for text in page.splitlines() if text.startswith("| " + " | ".join(beginning) + " |")]
    return found.strip("| ").split(" | ")


def test_every_number_of_a_row_is_in_a_table():
    _, page = written(rows())
    assert page.startswith("# Evaluation of RL")
    assert "the intervals, at 90 %, are over problems" in page
    scores = line(page, "math", "2", "2")
    assert scores[3].startswith("50.0 [") and scores[3].endswith("]")
    assert scores[-2:] == ["1: 50.0, 2: 50.0", "2: 50.0"]
    assert "Mean of these 2 accuracies, each suite counted once: 75.0." in page
    assert line(page, "math", "50.0", "50.0")[1:] == ["50.0", "50.0", "0.0", "0", "4", "math"]
    assert line(page, "arc", "100.0", "0.0")[1:] == ["100.0", "0.0", "100.0", "25.0"]
    assert line(page, "math", "r1_zero")[2:] == ["0.6", "1", "64", "'\\</answer>'", "vllm"]
    assert line(page, "3 1 problem")[1].startswith("100.0 [")
    assert "counts a response that names no option as a guess, and is not an accuracy" in page


def test_the_page_has_the_same_numbers_stands_alone_and_takes_no_name_for_markup():
    page, text = written(rows())
    read = stands_alone(page)
    assert {"Evaluation of RL", "hot & <b>", "math by subject", "math by level", "choice"} <= set(read.text)
    assert {"1: 50.0, 2: 50.0", "<i>Algebra</i> | $x$"} <= set(read.text)
    assert read.tags.count("img") == 3 and "b" not in read.tags and "<i>A" not in page
    assert "\\<i>Algebra\\</i> \\| $x$" in text
    assert (page, text) == written(rows())
    page, text = written(rows()[1:])
    assert page.count("<img") == 1
    assert not [absent for absent in ("by subject", "Mean of these") if absent in page + text]


def test_a_suite_without_readable_answers_is_advised_on():
    silent = [replace(WRONG, finish_reason="stop"), replace(RECORD, uid="c", outcome="unparsable", correct=False)]
    says = "math: 100 % of the responses have no answer that the grader can read; does the prompt"
    assert all(says in text for text in written([result_row(silent, 0.95)]))
    assert not any("the grader can read" in text for text in written([result_row([RECORD, WRONG], 0.95)]))

"""The page of a comparison as one HTML file, in the report's style, and its tables as text."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle

from luffy.evaluation.method_comparison.arms import Arm, CurvePoint
from luffy.evaluation.method_comparison.findings import Findings, SignificanceTest
from luffy.evaluation.results import Cell
from luffy.report import wording
from luffy.report.cost_tables import costs_by_name
from luffy.report.held_out_comparison import held_out_plots, steps_to_reach
from luffy.report.panels import Figure
from luffy.report.plotter import Dot, Series, curve_plot, dot_plot
from luffy.report.rendering import render
from luffy.report.score_cells import estimate_cell, score_cell
from luffy.report.tables import Table, TableCell, Tone
from luffy.report.tuning_section import tuning_section

_COLORS = ("c1", "c2", "c3", "c4", "c5", "c7")
_BASE_COLOR = "c6"
_NONE = "–"
_AXES: Mapping[str, tuple[str, Callable[[CurvePoint], float]]] = {
    "optimizer steps": ("Over optimizer steps", lambda point: point.steps),
    "rows learned from": ("Over samples", lambda point: point.samples),
    "seconds": ("Over time", lambda point: point.seconds),
}
_NOTES = (
    "Mean reward of rollouts at each RL step, mean over seeds. A cold start by SFT stands before the first point; an "
    "arm of SFT alone has no rewards.",
    "Rollouts and traces in the batches of updates.",
    "Time in training steps with their rollouts, on this machine and beside the other runs of this comparison.",
)


@dataclass(frozen=True, slots=True)
class ComparisonSection:
    """One decoding."""

    name: str
    accuracies: Table
    differences: Table | None
    dots: str


def render_comparison(findings: Findings) -> str:
    """The page, which needs no other file; the same findings give the same bytes."""
    colors = {arm.name: color for arm, color in zip(findings.arms, cycle(_COLORS), strict=False)}
    return render(
        "comparison.html.jinja",
        findings=findings,
        confidence=f"{100 * findings.confidence:g} %",
        num_tests=len(findings.tests),
        several_seeds=len(findings.seeds) > 1,
        sections=[_section(findings, decoding, colors) for decoding in findings.decodings],
        legend=[(_BASE_COLOR, "base"), *((colors[arm.name], arm.name) for arm in findings.arms if arm.seeds)],
        curves=_curves(findings, colors),
        held_out=held_out_plots(findings, colors),
        reached=steps_to_reach(findings),
        costs=cost_table(findings),
        tuning=tuning_section(findings.tuning, colors) if findings.tuning is not None else None,
    )


def accuracy_table(findings: Findings, decoding: str) -> Table:
    """Accuracy in percent: one row per arm, one column per suite; the base first."""
    cells = [(suite, decoding) for suite in findings.suites(decoding)]
    base = (TableCell("base"), *(estimate_cell(findings.base[cell]) for cell in cells))
    rows = [(_arm_cell(findings, arm), *(_score_cell(findings, arm, cell) for cell in cells)) for arm in findings.arms]
    return Table(("arm", *findings.suites(decoding)), (base, *rows))


def difference_table(findings: Findings, decoding: str) -> Table | None:
    """Differences from the reference in percentage points; None where nothing could be tested."""
    cells = [(suite, decoding) for suite in findings.suites(decoding)]
    rows = [
        (TableCell(arm.name), *(_test_cell(findings.tests.get((arm.name, cell))) for cell in cells))
        for arm in findings.arms
        if any((arm.name, cell) in findings.tests for cell in cells)
    ]
    return Table((f"minus {findings.reference}", *findings.suites(decoding)), tuple(rows)) if rows else None


def cost_table(findings: Findings) -> Table:
    """Mean costs of a seed of each arm; costs that no arm has get no column."""
    return costs_by_name("arm", {arm.name: arm.costs for arm in findings.arms})


def _section(findings: Findings, decoding: str, colors: Mapping[str, str]) -> ComparisonSection:
    rows = [(suite, _dots(findings, (suite, decoding), colors)) for suite in findings.suites(decoding)]
    return ComparisonSection(
        decoding,
        accuracy_table(findings, decoding),
        difference_table(findings, decoding),
        dot_plot(f"arms-{decoding}", rows),
    )


def _dots(findings: Findings, cell: Cell, colors: Mapping[str, str]) -> list[Dot]:
    estimates = [(_BASE_COLOR, findings.base[cell])]
    estimates += [
        (colors[arm.name], findings.scores[arm.name, cell].estimate)
        for arm in findings.arms
        if (arm.name, cell) in findings.scores
    ]
    return [Dot(color, estimate.value, estimate.low, estimate.high) for color, estimate in estimates]


def _curves(findings: Findings, colors: Mapping[str, str]) -> list[Figure]:
    learned = [arm for arm in findings.arms if arm.curve]
    if not learned:
        return []
    legend = tuple((colors[arm.name], arm.name) for arm in learned)
    percent = all(0 <= point.reward <= 1 for arm in learned for point in arm.curve)
    return [
        Figure(
            title,
            note,
            legend,
            curve_plot(f"reward-over-{over.replace(' ', '-')}", _lines(learned, colors, x), percent=percent, over=over),
        )
        for (over, (title, x)), note in zip(_AXES.items(), _NOTES, strict=True)
    ]


def _lines(arms: Sequence[Arm], colors: Mapping[str, str], x: Callable[[CurvePoint], float]) -> list[Series]:
    return [
        Series(arm.name, colors[arm.name], [x(point) for point in arm.curve], [point.reward for point in arm.curve])
        for arm in arms
    ]


def _arm_cell(findings: Findings, arm: Arm) -> TableCell:
    recipe = arm.chain if arm.chain == arm.method else f"{arm.chain}, {arm.method}"
    chosen = findings.tuning.chosen(arm.name) if findings.tuning is not None else None
    recipe += f", {chosen.point.text}" if chosen is not None else ""
    if not arm.failures:
        return TableCell(arm.name, (recipe,))
    done = f"{len(arm.seeds)} of {len(findings.seeds)} seeds" if arm.seeds else "all seeds"
    return TableCell(arm.name, (f"{recipe};", f"{done}, the others failed" if arm.seeds else f"{done} failed"), "worse")


def _score_cell(findings: Findings, arm: Arm, cell: Cell) -> TableCell:
    score = findings.scores.get((arm.name, cell))
    return TableCell("failed", (), "worse") if score is None else score_cell(score)


def _test_cell(test: SignificanceTest | None) -> TableCell:
    if test is None:
        return TableCell(_NONE)
    estimate = test.result.difference
    tone: Tone = "" if not test.is_significant else "better" if estimate.value > 0 else "worse"
    bounds = f"[{wording.signed(estimate.low)},{wording.NBSP}{wording.signed(estimate.high)}]"
    p = "p < 0.001" if test.adjusted_p < 0.001 else f"p = {test.adjusted_p:.3f}"
    return TableCell(wording.signed(estimate.value), (bounds, p), tone)

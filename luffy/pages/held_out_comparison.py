"""Held-out accuracy on the page of a comparison: curves with bands, and a table of steps to reach an accuracy."""

from collections.abc import Callable, Mapping, Sequence

from luffy.evaluation.method_comparison.arms import Arm
from luffy.evaluation.method_comparison.findings import Findings
from luffy.evaluation.method_comparison.held_out_arms import levels, reached, suites_of
from luffy.pages import wording
from luffy.pages.panels import Figure
from luffy.pages.plotter import Dot, bands_plot
from luffy.pages.tables import Table, TableCell
from luffy.tracking.metrics import HeldOutPoint

_AXES: Mapping[str, tuple[str, Callable[[HeldOutPoint], float]]] = {
    "optimizer steps": ("over optimizer steps", lambda point: point.steps),
    "rows learned from": ("over samples", lambda point: point.samples),
    "seconds": ("over time", lambda point: point.seconds),
}
_NOTE = (
    "Mean over seeds. Band: Student's t over seeds; with one seed, the interval over problems. Seconds are those of "
    "training steps, without the measurements."
)


def held_out_plots(findings: Findings, colors: Mapping[str, str]) -> list[Figure]:
    """Three figures per suite; none where no arm was measured while it trained."""
    suites = suites_of([arm.held_out for arm in _measured(findings)])
    return [_figure(findings, colors, suite, over) for suite in suites for over in _AXES]


def steps_to_reach(findings: Findings) -> list[tuple[str, Table]]:
    """For each suite, one row per arm and one column per tenth of accuracy: optimizer steps until it was reached."""
    tables = []
    for suite in suites_of([arm.held_out for arm in _measured(findings)]):
        curves = {arm.name: arm.held_out[suite] for arm in _measured(findings) if suite in arm.held_out}
        shown = levels([curve for of_arm in curves.values() for curve in of_arm])
        if shown:
            rows = tuple(
                (TableCell(arm), *(_reached_cell(of_arm, level) for level in shown)) for arm, of_arm in curves.items()
            )
            tables.append((suite, Table(("arm", *(f"{100 * level:.0f} %" for level in shown)), rows)))
    return tables


def _measured(findings: Findings) -> list[Arm]:
    return [arm for arm in findings.arms if arm.held_out]


def _figure(findings: Findings, colors: Mapping[str, str], suite: str, over: str) -> Figure:
    title, x = _AXES[over]
    means = {arm.name: arm.held_out_mean(suite, findings.confidence) for arm in _measured(findings)}
    means = {name: points for name, points in means.items() if points}
    curves = [([x(point) for point in points], _dots(points, colors[name])) for name, points in means.items()]
    legend = tuple((colors[name], name) for name in means)
    return Figure(f"{suite} {title}", _NOTE, legend, bands_plot(f"held-out-{suite}-{over}", curves, over))


def _dots(points: Sequence[HeldOutPoint], color: str) -> list[Dot]:
    return [Dot(color, point.accuracy, point.low, point.high) for point in points]


def _reached_cell(curves: tuple[tuple[HeldOutPoint, ...], ...], level: float) -> TableCell:
    found = reached(curves, level)
    if found.steps is not None:
        return TableCell(f"{found.steps:,.0f}")
    return TableCell(f"{found.num_seeds} of {wording.count(len(curves), 'seed')}" if found.num_seeds else "–")

"""The page of an experiment over a grid: lines for one key, maps for two, tables for any number."""

from dataclasses import dataclass

from luffy.config.many_runs.grid import value_text
from luffy.evaluation.grid_findings import GridFindings, PointResult
from luffy.evaluation.method_comparison.seed_scores import Score
from luffy.evaluation.results import Cell
from luffy.report import wording
from luffy.report.cost_tables import costs_by_name
from luffy.report.panels import Figure
from luffy.report.plotter import Dot, heat_plot, place_plot
from luffy.report.rendering import render
from luffy.report.score_cells import score_cell
from luffy.report.tables import Table, TableCell

_COLOR = "c1"


@dataclass(frozen=True, slots=True)
class GridSection:
    """One decoding."""

    name: str
    table: Table
    figures: list[Figure]
    """One for each suite; empty for a grid of three keys or more."""


def render_grid(findings: GridFindings) -> str:
    """The page, which needs no other file; the same findings give the same bytes."""
    rows = [seed.evaluation.results.confidence for each in findings.results for seed in each.seeds]
    return render(
        "grid.html.jinja",
        findings=findings,
        keys=[(key, ", ".join(map(value_text, values))) for key, values in findings.config.grid.items()],
        confidence=f"{100 * rows[0]:g} %" if rows else "",
        several_seeds=len(findings.config.seeds) > 1,
        sections=[_section(findings, decoding) for decoding in findings.decodings],
        costs=grid_costs(findings),
    )


def grid_table(findings: GridFindings, decoding: str) -> Table:
    """Accuracy in percent: a row for each point, a column for each suite."""
    cells = [(suite, decoding) for suite in findings.suites(decoding)]
    rows = [(_point_cell(findings, each), *(_cell(each.score(cell)) for cell in cells)) for each in findings.results]
    return Table(("point", *findings.suites(decoding)), tuple(rows))


def grid_costs(findings: GridFindings) -> Table:
    """Mean costs of a seed of each point."""
    return costs_by_name("point", {each.point.text: each.costs for each in findings.results})


def _section(findings: GridFindings, decoding: str) -> GridSection:
    drawn = [_figure(findings, (suite, decoding)) for suite in findings.suites(decoding)]
    return GridSection(decoding, grid_table(findings, decoding), [figure for figure in drawn if figure is not None])


def _figure(findings: GridFindings, cell: Cell) -> Figure | None:
    """Lines for one key, a map for two; None for more."""
    keys = list(findings.config.grid.items())
    scores, name = [each.score(cell) for each in findings.results], "-".join(cell)
    if len(keys) == 1:
        ((key, values),) = keys
        plot = place_plot(name, [value_text(value) for value in values], [(_COLOR, [*map(_dot, scores)])], key)
        return Figure(cell[0], "Mean accuracy with its interval.", (), plot)
    if len(keys) == 2:
        (down, rows), (across, columns) = keys
        means = [None if score is None else score.estimate.value for score in scores]
        lines = [means[start : start + len(columns)] for start in range(0, len(means), len(columns))]
        plot = heat_plot(name, (down, [*map(value_text, rows)]), (across, [*map(value_text, columns)]), lines)
        return Figure(cell[0], "Mean accuracy in percent; intervals are in the table.", (), plot)
    return None


def _dot(score: Score | None) -> Dot | None:
    return None if score is None else Dot(_COLOR, score.estimate.value, score.estimate.low, score.estimate.high)


def _cell(score: Score | None) -> TableCell:
    return TableCell("–") if score is None else score_cell(score)


def _point_cell(findings: GridFindings, each: PointResult) -> TableCell:
    if not each.failures:
        return TableCell(each.point.text)
    planned = wording.count(len(findings.config.seeds), "seed")
    return TableCell(each.point.text, (f"{len(each.seeds)} of {planned} finished",), "worse")

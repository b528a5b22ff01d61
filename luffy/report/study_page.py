"""The page of a study, its figure and its tables as Markdown, all made from the committed results."""

from itertools import cycle

from luffy.config.many_runs.study_config import CENTRE
from luffy.evaluation.results import Cell
from luffy.evaluation.study.study_findings import Effect, StudyFindings
from luffy.evaluation.study.study_results import REPORTED, TRIED, StudyResults
from luffy.report import wording
from luffy.report.panels import Figure
from luffy.report.plotter import Dot, gallery_svg, place_plot
from luffy.report.rendering import render
from luffy.report.score_cells import score_cell
from luffy.report.tables import Table, TableCell, Tone, text_table

_COLORS = ("c1", "c2", "c3", "c4", "c5", "c7", "c6", "c8")
_NONE = "–"
_TONES: dict[str, Tone] = {"ahead": "better", "behind": "worse", "not distinguishable": ""}


def study_html(findings: StudyFindings, results: StudyResults) -> str:
    """The page, which needs no other file; the same findings give the same bytes."""
    note = f"Percentage points minus {findings.config.reference}, with {_confidence(findings)} intervals."
    legend = tuple((color, arm) for arm, color in _colors(findings).items())
    figures = [Figure(title, note, legend, plot) for title, plot in _panels(findings)]
    return render("study.html.jinja", figures=figures, **_content(findings, results))


def study_markdown(findings: StudyFindings, results: StudyResults) -> str:
    """The same tables for a repository's pages."""
    return render("study.md.jinja", **_content(findings, results))


def study_figure(findings: StudyFindings) -> str:
    """Effect against the reference over the levels of every axis, as a self-contained SVG."""
    legend = [(color, arm) for arm, color in _colors(findings).items()]
    return gallery_svg(_panels(findings), legend)


def decision_table(findings: StudyFindings) -> Table:
    """For each cell, the arms that are better than, worse than, or not distinguishable from the reference."""
    rows = []
    for cell in findings.config.cells:
        known = {arm: effect for arm in findings.others if (effect := findings.effect(cell, arm)) is not None}
        if known:
            by_verdict = {
                verdict: ", ".join(_named(arm, effect) for arm, effect in known.items() if effect.verdict == verdict)
                for verdict in _TONES
            }
            rows.append((_situation(findings, cell), *(text or _NONE for text in by_verdict.values())))
    reference = findings.config.reference
    header = ("situation", f"ahead of {reference}", f"behind {reference}", "not distinguishable")
    return text_table(header, rows)


def planned_table(findings: StudyFindings) -> Table:
    """The planned tests, with what Holm's correction leaves of them."""
    rows = [
        (TableCell(_situation(findings, cell)), TableCell(arm), *_effect_cells(findings.effect(cell, arm)))
        for cell, arm in findings.config.planned
    ]
    return Table(("situation", "arm", "difference", "p, corrected", "verdict"), tuple(rows))


def accuracies_of_cells(findings: StudyFindings, measured: Cell) -> Table:
    """Accuracy in percent on one suite: a row for each cell, a column for the base and each arm."""
    arms = ("", *findings.config.arms)
    rows = [
        (TableCell(_situation(findings, cell)), *(_score(findings, cell, arm, measured) for arm in arms))
        for cell in findings.config.cells
        if any((cell, arm, measured) in findings.scores for arm in arms)
    ]
    return Table(("situation", "base", *arms[1:]), tuple(rows))


def effects_of_cells(findings: StudyFindings, measured: Cell) -> Table:
    """Differences from the reference on one suite; exploratory except for the planned tests."""
    rows = [
        (
            TableCell(_situation(findings, cell)),
            *(_effect_cell(findings.effects.get((cell, arm, measured))) for arm in findings.others),
        )
        for cell in findings.config.cells
        if any((cell, arm, measured) in findings.effects for arm in findings.others)
    ]
    return Table((f"minus {findings.config.reference}", *findings.others), tuple(rows))


def tuning_of_cells(results: StudyResults) -> Table | None:
    """What was tried for each arm and what was chosen; None where nothing was tuned."""
    tried = [row for row in results.measures if row.role == TRIED and row.measure == "accuracy"]
    chosen = results.chosen
    means: dict[tuple[str, str, int, str], list[float]] = {}
    for row in tried:
        means.setdefault((row.cell, row.arm, row.point, row.values), []).append(row.value)
    rows = [
        (cell, arm, values, wording.percent(sum(each) / len(each)), "yes" if is_chosen else "")
        for (cell, arm, point, values), each in means.items()
        for is_chosen in [chosen.get(cell, {}).get(arm) == point]
    ]
    return text_table(("tuned at", "arm", "values", "accuracy on validation", "chosen"), rows) if rows else None


def costs_of_cells(results: StudyResults) -> Table:
    """Mean costs of a reported run over seeds."""
    names = ("optimizer_steps", "rollouts", "generated_tokens", "trained_tokens", "seconds")
    spent: dict[tuple[str, str], dict[str, list[float]]] = {}
    for row in results.measures:
        if row.role == REPORTED and not row.suite:
            spent.setdefault((row.cell, row.arm), {}).setdefault(row.measure, []).append(row.value)
    rows = [
        (*place, *(f"{sum(each) / len(each):,.0f}" if (each := values.get(name)) else _NONE for name in names))
        for place, values in spent.items()
    ]
    return text_table(("cell", "arm", *(name.replace("_", " ") for name in names)), rows)


def _content(findings: StudyFindings, results: StudyResults) -> dict[str, object]:
    sections = [
        (f"{suite}, {decoding}", accuracies_of_cells(findings, on), effects_of_cells(findings, on))
        for on in findings.measured
        for suite, decoding in [on]
    ]
    return {
        "config": findings.config,
        "confidence": _confidence(findings),
        "num_missing": len(findings.missing),
        "decision": decision_table(findings),
        "planned": planned_table(findings) if findings.config.planned else None,
        "sections": sections,
        "tuning": tuning_of_cells(results),
        "costs": costs_of_cells(results),
    }


def _panels(findings: StudyFindings) -> list[tuple[str, str]]:
    """A title and a plot for each axis that has results away from the centre."""
    config, colors = findings.config, _colors(findings)
    found = []
    for name, axis in config.axes.items():
        cells = [CENTRE if level == axis.centre else f"{name}-{level}" for level in axis.levels]
        if any(findings.effect(cell, arm) for cell in cells if cell != CENTRE for arm in colors):
            lines = [
                (color, [_dot(findings.effect(cell, arm), color) for cell in cells]) for arm, color in colors.items()
            ]
            found.append((axis.title, place_plot(name, [each.label for each in axis.levels.values()], lines, "")))
    return found


def _dot(effect: Effect | None, color: str) -> Dot | None:
    if effect is None:
        return None
    estimate = effect.result.difference
    return Dot(color, estimate.value, estimate.low, estimate.high)


def _colors(findings: StudyFindings) -> dict[str, str]:
    return dict(zip(findings.others, cycle(_COLORS), strict=False))


def _confidence(findings: StudyFindings) -> str:
    return f"{100 * findings.confidence:g} %"


def _situation(findings: StudyFindings, cell: str) -> str:
    config = findings.config
    away = [
        f"{config.axes[name].title}: {config.axes[name].levels[level].label}"
        for name, level in config.cells[cell].items()
        if level != config.axes[name].centre
    ]
    return ", ".join(away) or "centre"


def _named(arm: str, effect: Effect) -> str:
    estimate = effect.result.difference
    bounds = f"[{wording.signed(estimate.low)}, {wording.signed(estimate.high)}]"
    mark = "" if effect.is_planned else ", exploratory"
    return f"{arm} ({wording.signed(estimate.value)} {bounds}{mark})"


def _effect_cells(effect: Effect | None) -> tuple[TableCell, ...]:
    if effect is None:
        return TableCell(_NONE), TableCell(_NONE), TableCell("not run yet")
    estimate = effect.result.difference
    bounds = f"[{wording.signed(estimate.low)},{wording.NBSP}{wording.signed(estimate.high)}]"
    p = "< 0.001" if effect.p_value < 0.001 else f"{effect.p_value:.3f}"
    tone = _TONES[effect.verdict]
    return TableCell(wording.signed(estimate.value), (bounds,)), TableCell(p), TableCell(effect.verdict, (), tone)


def _effect_cell(effect: Effect | None) -> TableCell:
    if effect is None:
        return TableCell(_NONE)
    value, p, verdict = _effect_cells(effect)
    kind = "planned" if effect.is_planned else "exploratory"
    return TableCell(value.text, (*value.details, f"p {p.text.replace('< ', '<')}, {kind}"), verdict.tone)


def _score(findings: StudyFindings, cell: str, arm: str, measured: Cell) -> TableCell:
    score = findings.scores.get((cell, arm, measured))
    return TableCell(_NONE) if score is None else score_cell(score)

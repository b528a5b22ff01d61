"""The pages of many runs: a grid, a comparison of methods with its tuning, and a study of many situations.

Each is one HTML file that needs no other; the same findings give the same bytes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import cycle

from luffy.config.many_runs.sweep_design import CENTRE, value_text
from luffy.evaluation.across_runs.run_results import ArmResults, levels, reached
from luffy.evaluation.across_runs.sweep_findings import ArmTuning, Effect, Findings, Score, Try, Tuning
from luffy.evaluation.across_runs.sweep_results import REPORTED, TRIED, SweepResults
from luffy.evaluation.results import Cell
from luffy.report.cells import (
    NONE,
    Table,
    TableCell,
    Tone,
    accuracy,
    costs_by_name,
    count,
    difference,
    percent,
    table,
)
from luffy.report.curves import held_out_line
from luffy.report.evaluation_page import DOT_NOTE
from luffy.report.figures import Chart, Line, chart, dots, estimates, heat, picture
from luffy.report.page import Figure, Page, Section, html, markdown
from luffy.statistics.accuracy import Estimate
from luffy.tracking.metrics import HeldOutPoint

_COLORS = ("c1", "c2", "c3", "c4", "c5", "c7")
_STUDY_COLORS = (*_COLORS, "c6", "c8")
_BASE_COLOR = "c6"
_OVER = {
    "optimizer steps": (
        "steps",
        "Over optimizer steps",
        "Mean reward of rollouts at each RL step, mean over seeds. A cold start by SFT stands before the first point; "
        "an arm of SFT alone has no rewards.",
    ),
    "rows learned from": ("samples", "Over samples", "Rollouts and traces in the batches of updates."),
    "seconds": (
        "seconds",
        "Over time",
        "Time in training steps with their rollouts, on this machine and beside the other runs of this comparison.",
    ),
}
"""What curves are drawn over: the field of their points, the title, and a note on rewards."""
_HELD_OUT_NOTE = (
    "Mean over seeds. Band: Student's t over seeds; with one seed, the interval over problems. Seconds are those of "
    "training steps, without the measurements."
)
_FAILED, _CHOSEN = TableCell("failed", (), "worse"), TableCell("chosen", (), "better")
_TONES: dict[str, Tone] = {"ahead": "better", "behind": "worse", "not distinguishable": ""}


def sweep_page(findings: Findings) -> Page:
    """The page of a grid or a comparison; that of a study also needs its rows (`study_html`)."""
    return _comparison_page(findings) if findings.design.arms else _grid_page(findings)


def accuracy_table(findings: Findings, decoding: str) -> Table:
    """Accuracy in percent: a row for each arm or point, a column for each suite; the base first."""
    suites, is_grid = findings.suites(decoding), not findings.design.arms
    first, missing = (_point, None) if is_grid else (_arm, _FAILED)
    base = [findings.score("", (suite, decoding)) for suite in suites]
    rows = [
        *([("base", *map(_score, base))] if any(base) else []),
        *(
            (first(findings, arm), *(_score(findings.score(arm.name, (suite, decoding)), missing) for suite in suites))
            for arm in findings.arms
        ),
    ]
    return table(("point" if is_grid else "arm", *suites), rows, style="numbers")


def difference_table(findings: Findings, decoding: str) -> Table | None:
    """Differences from the reference in percentage points; None where nothing could be tested."""
    suites, reference = findings.suites(decoding), findings.design.reference
    effects = {
        arm.name: [findings.effect(CENTRE, arm.name, (suite, decoding)) for suite in suites] for arm in findings.arms
    }
    rows = [(arm, *map(_tested, found)) for arm, found in effects.items() if any(found)]
    title = f"Percentage points minus {reference}"
    return table((f"minus {reference}", *suites), rows, title, style="numbers") if rows else None


def cost_table(findings: Findings) -> Table:
    """Mean costs of a seed of each arm or point; costs that none has get no column."""
    return costs_by_name("arm" if findings.design.arms else "point", {arm.name: arm.costs for arm in findings.arms})


def steps_to_reach(findings: Findings) -> list[Table]:
    """For each suite, one row per arm and one column per tenth of accuracy: optimizer steps until it was reached."""
    tables, measured = [], [arm for arm in findings.arms if arm.held_out]
    for suite in dict.fromkeys(suite for arm in measured for suite in arm.held_out):
        curves = {arm.name: arm.held_out[suite] for arm in measured if suite in arm.held_out}
        if shown := levels([curve for of_arm in curves.values() for curve in of_arm]):
            tables.append(
                table(
                    ("arm", *(f"{100 * level:.0f} %" for level in shown)),
                    ((name, *(_reached(of_arm, level) for level in shown)) for name, of_arm in curves.items()),
                    f"Optimizer steps to reach an accuracy on {suite}",
                    "Until it was first measured, mean over seeds; where only some seeds measured it, how many.",
                    "numbers",
                )
            )
    return tables


def tries_table(tuning: Tuning) -> Table:
    """A row for each point of each arm, in the order of its grid, with its accuracy."""
    rows = (
        (arm.arm, each.point.text, _score(each.score, _FAILED), _CHOSEN if each is arm.chosen else "")
        for arm in tuning.arms
        for each in arm.tries
    )
    return table(("arm", "tried", f"accuracy on {tuning.on}", "decision"), rows, style="numbers")


def tuning_costs(tuning: Tuning) -> Table:
    """Total costs of all tries of each arm."""
    return costs_by_name("arm", {arm.arm: arm.costs for arm in tuning.arms})


def study_html(findings: Findings, results: SweepResults) -> str:
    """The page of a study."""
    return html(_study_page(findings, results))


def study_markdown(findings: Findings, results: SweepResults) -> str:
    """The same tables for a repository's pages, beside the figure."""
    name = findings.design.name
    figure = f"Effect against {findings.design.reference}", f"{name}.svg"
    page = replace(_study_page(findings, results), title=f"Results of {name}", subtitle="", picture=figure)
    return f"<!-- Written by `luffy study --page`; do not edit. -->\n\n{markdown(page)}\n"


def study_figure(findings: Findings) -> str:
    """Effect against the reference over the levels of every axis, as a self-contained SVG."""
    return picture(_effects(findings), legend=[(color, arm) for arm, color in _colors(findings).items()])


def decision_table(findings: Findings) -> Table:
    """For each cell, the arms that are better than, worse than, or not distinguishable from the reference."""
    rows = []
    for cell in findings.design.cells:
        known = {arm: effect for arm in findings.design.others if (effect := findings.effect(cell, arm)) is not None}
        if known:
            by_verdict = (
                ", ".join(_named(arm, effect) for arm, effect in known.items() if effect.verdict == verdict)
                for verdict in _TONES
            )
            rows.append((findings.design.situation(cell) or CENTRE, *(text or NONE for text in by_verdict)))
    reference = findings.design.reference
    return table(("situation", f"ahead of {reference}", f"behind {reference}", "not distinguishable"), rows)


def accuracies_of_cells(findings: Findings, measured: Cell) -> Table:
    """Accuracy in percent on one suite: a row for each cell, a column for the base and each arm."""
    arms, scores = ("", *findings.design.arms), findings.scores
    rows = (
        (findings.design.situation(cell) or CENTRE, *(_score(scores.get((cell, arm, measured))) for arm in arms))
        for cell in findings.design.cells
        if any((cell, arm, measured) in scores for arm in arms)
    )
    note = "Accuracy in percent, mean over seeds and problems (each seed):"
    return table(("situation", "base", *arms[1:]), rows, note=note, style="numbers")


def _grid_page(findings: Findings) -> Page:
    """Lines for one key, maps for two, tables for any number."""
    design, confidence, notes = findings.design, f"{100 * findings.confidence:g} %", list[str]()
    if findings.scores and len(design.seeds) > 1:
        notes.append(
            f"Accuracy in percent, mean over seeds (in brackets) and problems; {confidence} intervals are over seeds "
            "and problems."
        )
    elif findings.scores:
        notes.append(
            f"Accuracy in percent, with one seed: {confidence} intervals are over problems only, and say nothing about "
            "what another seed would give."
        )
    notes.append(
        "The highest of several accuracies is too high an estimate of what its values give. To choose values, let a "
        "comparison select them on problems and seeds that it does not report."
    )
    keys = (f"{key}: {', '.join(map(value_text, values))}" for key, values in (design.grid or {}).items())
    sections = (
        Section(
            title=decoding,
            figures=tuple(
                drawn for suite in findings.suites(decoding) if (drawn := _grid_figure(findings, (suite, decoding)))
            ),
            tables=(accuracy_table(findings, decoding),),
        )
        for decoding in findings.decodings
    )
    seeds = ("seeds " if len(design.seeds) > 1 else "seed ") + ", ".join(map(str, design.seeds))
    return Page(
        design.name,
        f"{len(findings.arms)} points · {seeds} · {'; '.join(keys)}",
        (
            *_failures(findings.failures),
            Section(title="Results", notes=tuple(notes), sections=tuple(sections)),
            Section(title="Costs", aside="of one seed, mean over seeds", tables=(cost_table(findings),)),
        ),
        "grid",
    )


def _comparison_page(findings: Findings) -> Page:
    """Arms against a reference: results, held-out accuracy, learning curves, tuning and costs."""
    colors = {arm.name: color for arm, color in zip(findings.arms, cycle(_COLORS), strict=False)}
    tuned = f" · tuned with {findings.tuning.num_tries} tries each" if findings.tuning else ""
    held_out, reached_on = _held_out_figures(findings, colors), steps_to_reach(findings)
    sections = [
        *_failures(findings.failures),
        Section(
            title="Results",
            anchor="results",
            notes=_notes(findings),
            sections=tuple(_of_decoding(findings, decoding, colors) for decoding in findings.decodings),
        ),
    ]
    if held_out:
        sections.append(
            Section(
                title="Held-out accuracy",
                aside="while training",
                anchor="held-out",
                figures=held_out,
                tables=tuple(reached_on),
            )
        )
    if curves := _reward_figures(findings, colors):
        aside = "reward in training"
        sections.append(Section(title="Learning curves", aside=aside, anchor="curves", figures=curves))
    if findings.tuning is not None:
        sections.append(_tuning(findings.tuning, colors))
    sections.append(
        Section(
            title="Costs",
            aside="of one seed, mean over seeds",
            anchor="costs",
            warnings=tuple(findings.off_budget),
            notes=(
                "Everything after the base policy, including a cold start by SFT, even though arms of one seed share "
                "it. The budget is the same for all; the rest is what it took.",
            ),
            tables=(cost_table(findings),),
        )
    )
    design = findings.design
    assert design.budget is not None
    seeds = ", ".join(map(str, design.seeds))
    subtitle = f"{len(findings.arms)} arms · seeds {seeds} · {design.budget.text} each{tuned}"
    return Page(design.name, f"{subtitle} · reference {design.reference}", tuple(sections), "comparison")


def _failures(lines: Sequence[str]) -> tuple[Section, ...]:
    return (Section(title="Failed runs", anchor="failures", warnings=tuple(lines)),) if lines else ()


def _score(score: Score | None, missing: TableCell | None = None) -> TableCell:
    if score is None:
        return missing or accuracy(None)
    return accuracy(score.estimate, score.by_seed.values())


def _grid_figure(findings: Findings, cell: Cell) -> Figure | None:
    """Lines for one key, a map for two; None for more, and where nothing has finished."""
    keys, name = list((findings.design.grid or {}).items()), "-".join(cell)
    scores = [findings.score(arm.name, cell) for arm in findings.arms]
    found = [None if score is None else score.estimate for score in scores]
    if len(keys) == 1:
        ((key, values),) = keys
        places = [value_text(value) for value in values]
        line = _at_places(cell[0], key, places, {"accuracy": found}, {"accuracy": "c1"})
        return Figure(cell[0], "Mean accuracy with its interval.", chart(name, line))
    if len(keys) == 2:
        (down, rows), (across, columns) = keys
        means = [None if each is None else each.value for each in found]
        lines = [means[start : start + len(columns)] for start in range(0, len(means), len(columns))]
        drawn = heat(name, (down, [*map(value_text, rows)]), (across, [*map(value_text, columns)]), lines)
        return Figure(cell[0], "Mean accuracy in percent; intervals are in the table.", drawn)
    return None


def _at_places(
    title: str,
    over: str,
    places: Sequence[str],
    found: Mapping[str, Sequence[Estimate | None]],
    colors: Mapping[str, str],
) -> Chart:
    """A line for each name in `found`, with intervals; None leaves a gap."""
    lines = []
    for name, of_places in found.items():
        known = {x: each for x, each in enumerate(of_places) if each is not None}
        lines.append(estimates(name, colors[name], list(known), list(known.values())))
    return Chart(title, lines, over=over, percent=True, places=places)


def _point(findings: Findings, arm: ArmResults) -> TableCell:
    if not arm.failures:
        return TableCell(arm.name)
    done = f"{len(arm.seeds)} of {count(len(findings.design.seeds), 'seed')} finished"
    return TableCell(arm.name, (done,), "worse")


def _notes(findings: Findings) -> tuple[str, ...]:
    confidence, num_tests = f"{100 * findings.confidence:g} %", len(findings.effects)
    if len(findings.design.seeds) == 1:
        return (
            f"Accuracy in percent. There is one seed: {confidence} intervals and tests are over problems only, and say "
            "nothing about what another seed would give. Differences are paired by problem (Student's t); green and "
            f"red ones are significant after Holm's correction over all {num_tests} tests of this page.",
        )
    return (
        f"Accuracy in percent, mean over seeds (in brackets) and problems. {confidence} intervals are over seeds and "
        "problems, what other seeds and another set of problems of the same kind would give: the interval over "
        "problems, and that of Student's t over the seeds, their distances from the mean added in squares. That of the "
        "base is over problems only.",
        "Differences are paired by seed and problem: the variance over seeds and the variance over problems added, and "
        "Student's t with Satterthwaite's degrees of freedom. Green and red ones are significant after Holm's "
        f"correction over all {num_tests} tests of this page, whose p-value stands beside them.",
    )


def _of_decoding(findings: Findings, decoding: str, colors: Mapping[str, str]) -> Section:
    bands = []
    for suite in findings.suites(decoding):
        scores = {name: findings.score(name, (suite, decoding)) for name in ("", *(arm.name for arm in findings.arms))}
        known = [(colors.get(name, _BASE_COLOR), each.estimate) for name, each in scores.items() if each is not None]
        bands.append((suite, known))
    legend = ((_BASE_COLOR, "base"), *((colors[arm.name], arm.name) for arm in findings.arms if arm.seeds))
    tested = difference_table(findings, decoding)
    return Section(
        title=decoding,
        figures=(Figure("Accuracy", DOT_NOTE, dots(f"arms-{decoding}", bands), legend, is_wide=True),),
        tables=(accuracy_table(findings, decoding), *([tested] if tested is not None else [])),
    )


def _arm(findings: Findings, arm: ArmResults) -> TableCell:
    own = findings.design.arms[arm.name]
    recipe = own.chain if own.chain == own.method else f"{own.chain}, {own.method}"
    chosen = findings.tuning.chosen(arm.name) if findings.tuning is not None else None
    recipe += f", {chosen.point.text}" if chosen is not None else ""
    if not arm.failures:
        return TableCell(arm.name, (recipe,))
    done = f"{len(arm.seeds)} of {len(findings.design.seeds)} seeds" if arm.seeds else "all seeds"
    return TableCell(arm.name, (f"{recipe};", f"{done}, the others failed" if arm.seeds else f"{done} failed"), "worse")


def _tested(effect: Effect | None) -> TableCell:
    if effect is None:
        return TableCell(NONE)
    return difference(effect.result.difference, effect.adjusted_p, tone=_TONES[effect.verdict])


def _held_out_figures(findings: Findings, colors: Mapping[str, str]) -> tuple[Figure, ...]:
    """Three figures per suite; none where no arm was measured while it trained."""
    measured, figures = [arm for arm in findings.arms if arm.held_out], []
    for suite in dict.fromkeys(suite for arm in measured for suite in arm.held_out):
        means = {arm.name: points for arm in measured if (points := arm.held_out_mean(suite, findings.confidence))}
        legend = tuple((colors[name], name) for name in means)
        for over, (place, title, _) in _OVER.items():
            lines = [
                held_out_line(name, colors[name], [getattr(point, place) for point in found], found)
                for name, found in means.items()
            ]
            drawn = chart(f"held-out-{suite}-{over}", Chart(suite, lines, over=over, percent=True))
            figures.append(Figure(f"{suite} {title.lower()}", _HELD_OUT_NOTE, drawn, legend))
    return tuple(figures)


def _reached(curves: tuple[tuple[HeldOutPoint, ...], ...], level: float) -> str:
    num_seeds, steps = reached(curves, level)
    if steps is not None:
        return f"{steps:,.0f}"
    return f"{num_seeds} of {count(len(curves), 'seed')}" if num_seeds else NONE


def _reward_figures(findings: Findings, colors: Mapping[str, str]) -> tuple[Figure, ...]:
    learned = [arm for arm in findings.arms if arm.curve]
    percent_of = all(0 <= point.reward <= 1 for arm in learned for point in arm.curve)
    legend = tuple((colors[arm.name], arm.name) for arm in learned)
    figures = []
    for over, (place, title, note) in _OVER.items() if learned else ():
        lines = [
            Line(
                arm.name,
                colors[arm.name],
                [getattr(point, place) for point in arm.curve],
                [point.reward for point in arm.curve],
            )
            for arm in learned
        ]
        drawn = Chart(title, lines, over=over, percent=percent_of)
        figures.append(Figure(title, note, chart(f"reward-over-{over.replace(' ', '-')}", drawn), legend))
    return tuple(figures)


def _tuning(tuning: Tuning, colors: Mapping[str, str]) -> Section:
    tries, seeds = f"{tuning.num_tries} tries" if tuning.num_tries > 1 else "1 try", ", ".join(map(str, tuning.seeds))
    drawn = ", drawn at random from its grid" if tuning.is_random else ""
    ran = f"seed {seeds}" if len(tuning.seeds) == 1 else f"seeds {seeds}"
    words = (
        f"Every arm had {tries}{drawn}, each run with {ran} and evaluated only on {tuning.on} ({tuning.decoding}); "
        "nothing that is reported above was used. The highest mean accuracy was chosen, of equal ones the first in the "
        "grid."
    )
    costs = replace(
        tuning_costs(tuning),
        title="What tuning cost: all finished tries of an arm together",
        note="On top of the costs below. A stage that several tries share, such as an SFT before RL, is counted once.",
    )
    return Section(
        title="Tuning",
        aside="before the reported runs",
        anchor="tuning",
        warnings=tuple(tuning.warnings),
        notes=(words,),
        figures=tuple(_tries_figures(tuning, colors)),
        tables=(tries_table(tuning), costs),
    )


def _tries_figures(tuning: Tuning, colors: Mapping[str, str]) -> list[Figure]:
    """A figure for each key that is the only key in the grids of some arms, where a try has finished."""
    by_key: dict[str, list[ArmTuning]] = {}
    for arm in tuning.arms:
        if len(arm.tries[0].point.values) == 1:
            by_key.setdefault(arm.tries[0].point.values[0][0], []).append(arm)
    figures = []
    for key, arms in by_key.items():
        found = {arm.arm: {_value(each): each.score.estimate for each in arm.tries if each.score} for arm in arms}
        places = list(dict.fromkeys(_value(each) for arm in arms for each in arm.tries))
        at_places = {arm: [of_arm.get(place) for place in places] for arm, of_arm in found.items()}
        if any(found.values()):
            drawn = chart(f"tries-{key}", _at_places(key, key, places, at_places, colors))
            legend = tuple((colors[arm], arm) for arm in found)
            figures.append(Figure(key, "Accuracy of each try, with its interval.", drawn, legend))
    return figures


def _value(each: Try) -> str:
    return value_text(each.point.values[0][1])


def _study_page(findings: Findings, results: SweepResults) -> Page:
    design, confidence = findings.design, f"{100 * findings.confidence:g} %"
    note = f"Percentage points minus {design.reference}, with {confidence} intervals."
    legend = tuple((color, arm) for arm, color in _colors(findings).items())
    figures = (Figure(each.title, note, chart(each.title, each), legend) for each in _effects(findings))
    suite, decoding = findings.measured[0]
    assert design.budget is not None
    aside = f"{suite}, {decoding}"
    differ = f"Differences from {design.reference} on {suite} ({decoding}) in percentage points"
    sections = [
        Section(title=f"Effect against {design.reference}", aside=aside, figures=tuple(figures)),
        Section(
            title="What to take when",
            notes=(
                f"{differ} with {confidence} intervals over seeds and problems. A planned test counts after Holm's "
                "correction over all planned tests; everything else is exploratory and uncorrected.",
            ),
            tables=(decision_table(findings),),
        ),
    ]
    if design.planned:
        missing = f"{len(findings.missing)} of {len(design.planned)} planned tests have no results yet; they count in "
        notes = (f"{missing}the correction.",) if findings.missing else ()
        sections.append(Section(title="Planned tests", notes=notes, tables=(_planned(findings),)))
    sections += [
        Section(title=", ".join(on), tables=(accuracies_of_cells(findings, on), _effects_table(findings, on)))
        for on in findings.measured
    ]
    if (tuned := _tried_of_cells(results)).rows:
        sections.append(Section(title="Tuning", tables=(tuned,)))
    sections.append(Section(title="Costs of a run, mean over seeds", tables=(_costs_of_cells(results),)))
    if design.limits:
        sections.append(Section(title="Limits", text=tuple(design.limits)))
    seeds, elsewhere = (", ".join(map(str, each)) for each in (design.seeds, design.seeds_elsewhere))
    subtitle = (
        f"{len(design.cells)} cells · {len(design.arms)} arms · {design.budget.text} · seeds {seeds} at the centre, "
        f"{elsewhere} elsewhere"
    )
    return Page(design.name, subtitle, tuple(sections), "study")


def _planned(findings: Findings) -> Table:
    """The planned tests, with what Holm's correction leaves of them."""
    rows: list[tuple[str | TableCell, ...]] = []
    for cell, arm in findings.design.planned:
        effect = findings.effect(cell, arm)
        if effect is None:
            rows.append((findings.design.situation(cell) or CENTRE, arm, NONE, NONE, "not run yet"))
            continue
        p = "< 0.001" if effect.p_value < 0.001 else f"{effect.p_value:.3f}"
        verdict = TableCell(effect.verdict, (), _TONES[effect.verdict])
        rows.append((findings.design.situation(cell) or CENTRE, arm, difference(effect.result.difference), p, verdict))
    return table(("situation", "arm", "difference", "p, corrected", "verdict"), rows)


def _effects_table(findings: Findings, measured: Cell) -> Table:
    """Differences from the reference on one suite; exploratory except for the planned tests."""
    effects, others = findings.effects, findings.design.others
    rows = (
        (findings.design.situation(cell) or CENTRE, *(_effect(effects.get((cell, arm, measured))) for arm in others))
        for cell in findings.design.cells
        if any((cell, arm, measured) in effects for arm in others)
    )
    header = (f"minus {findings.design.reference}", *others)
    return table(header, rows, note="Differences in percentage points:", style="numbers")


def _effect(effect: Effect | None) -> TableCell:
    if effect is None:
        return TableCell(NONE)
    p = "<0.001" if effect.p_value < 0.001 else f"{effect.p_value:.3f}"
    kind = "planned" if effect.is_planned else "exploratory"
    return difference(effect.result.difference, notes=(f"p {p}, {kind}",), tone=_TONES[effect.verdict])


def _tried_of_cells(results: SweepResults) -> Table:
    """What was tried for each arm and what was chosen; without rows where nothing was tuned."""
    chosen, means = results.chosen, dict[tuple[str, str, int, str], list[float]]()
    for row in results.measures:
        if row.role == TRIED and row.measure == "accuracy":
            means.setdefault((row.cell, row.arm, row.point, row.values), []).append(row.value)
    rows = (
        (cell, arm, values, percent(sum(each) / len(each)), "yes" if chosen.get(cell, {}).get(arm) == point else "")
        for (cell, arm, point, values), each in means.items()
    )
    return table(("tuned at", "arm", "values", "accuracy on validation", "chosen"), rows)


def _costs_of_cells(results: SweepResults) -> Table:
    """Mean costs of a reported run over seeds."""
    names = ("optimizer_steps", "rollouts", "generated_tokens", "trained_tokens", "seconds")
    spent: dict[tuple[str, str], dict[str, list[float]]] = {}
    for row in results.measures:
        if row.role == REPORTED and not row.suite:
            spent.setdefault((row.cell, row.arm), {}).setdefault(row.measure, []).append(row.value)
    rows = (
        (*place, *(f"{sum(each) / len(each):,.0f}" if (each := values.get(name)) else NONE for name in names))
        for place, values in spent.items()
    )
    return table(("cell", "arm", *(name.replace("_", " ") for name in names)), rows)


def _effects(findings: Findings) -> list[Chart]:
    """A chart for each axis that has results away from the centre."""
    charts = []
    for name, axis in findings.design.axes.items():
        cells = [CENTRE if level == axis.centre else f"{name}-{level}" for level in axis.levels]
        found = {arm: [findings.effect(cell, arm) for cell in cells] for arm in findings.design.others}
        if any(findings.effect(cell, arm) for arm in findings.design.others for cell in cells if cell != CENTRE):
            differences = {
                arm: [None if effect is None else effect.result.difference for effect in of_arm]
                for arm, of_arm in found.items()
            }
            labels = [each.label for each in axis.levels.values()]
            charts.append(_at_places(axis.title, "", labels, differences, _colors(findings)))
    return charts


def _colors(findings: Findings) -> dict[str, str]:
    return dict(zip(findings.design.others, cycle(_STUDY_COLORS), strict=False))


def _named(arm: str, effect: Effect) -> str:
    mark = "" if effect.is_planned else ", exploratory"
    return f"{arm} ({difference(effect.result.difference).plain}{mark})"

"""The pages of many runs: a grid, a comparison of methods with its tuning, and a study of many situations.

Each is one HTML file that needs no other; the same findings give the same bytes.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import cycle
from statistics import fmean

from luffy.config.many_runs.sweep_design import ONLY_CELL, value_text
from luffy.evaluation.across_runs.run_results import REPORTED, TRIED, ArmResults, CurvePoint, SweepResults
from luffy.evaluation.across_runs.sweep_findings import Effect, Findings, Score, Tuning
from luffy.evaluation.results import Cell
from luffy.report.cells import NONE, Table, TableCell, Tone, accuracy, costs_by_name, count, difference, percent, table
from luffy.report.evaluation_page import accuracy_figure
from luffy.report.figures import Chart, Line, chart, estimates, picture
from luffy.report.page import Figure, Page, Section
from luffy.statistics.accuracy import Estimate
from luffy.tracking.metrics import HeldOutPoint

_COLORS = ("c1", "c2", "c3", "c4", "c5", "c7")
_BASE_COLOR = "c6"
_MIN_SEEDS = 3
"""With fewer, a comparison warns."""
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
_FAILED = TableCell("failed", (), "worse")
_PLANNED = "*"
"""Marks the planned tests of a study; all others are exploratory."""
_TONES: dict[str, Tone] = {"ahead": "better", "behind": "worse", "not distinguishable": ""}


def sweep_page(findings: Findings) -> Page:
    """The page of a grid or a comparison; that of a study also needs its rows (`study_page`)."""
    page = _comparison_page(findings) if findings.design.arms else _grid_page(findings)
    if not findings.failures:
        return page
    failed = Section(title="Failed runs", anchor="failures", warnings=tuple(findings.failures))
    return replace(page, sections=(failed, *page.sections))


def accuracy_table(findings: Findings, decoding: str) -> Table:
    """Accuracy in percent: a row for each arm or point, a column for each suite; the base first."""
    suites, (kind, missing) = findings.suites(decoding), ("arm", _FAILED) if findings.design.arms else ("point", None)
    names, rows = {"": TableCell("base"), **{arm.name: _name(findings, arm) for arm in findings.arms}}, []
    for name, shown in names.items():
        found = [findings.score(name, (suite, decoding)) for suite in suites]
        if name or any(found):
            rows.append((shown, *(_score(each, missing if name else None) for each in found)))
    return table((kind, *suites), rows, style="numbers")


def difference_table(findings: Findings, decoding: str) -> Table | None:
    """Differences from the reference in percentage points; None where nothing could be tested."""
    suites, reference = findings.suites(decoding), findings.design.reference
    rows = []
    for arm in findings.arms:
        if any(found := [findings.effect(ONLY_CELL, arm.name, (suite, decoding)) for suite in suites]):
            rows.append((arm.name, *map(_effect, found)))
    title = f"Percentage points minus {reference}"
    return table((f"minus {reference}", *suites), rows, title, style="numbers") if rows else None


def cost_table(findings: Findings) -> Table:
    """Mean costs of a seed of each arm or point; costs that none has get no column."""
    return costs_by_name("arm" if findings.design.arms else "point", {arm.name: arm.costs for arm in findings.arms})


def steps_to_reach(findings: Findings) -> list[Table]:
    """For each suite, one row per arm and one column per tenth of accuracy: optimizer steps until it was reached.

    The tenths are those that some seed reached, and that not all had at their first measurement.
    """
    tables = []
    for suite in dict.fromkeys(suite for arm in findings.arms for suite in arm.held_out):
        curves = {arm.name: arm.held_out[suite] for arm in findings.arms if suite in arm.held_out}
        measured = [curve for of_arm in curves.values() for curve in of_arm if curve]
        start = min(curve[0].accuracy for curve in measured)
        most = max(point.accuracy for curve in measured for point in curve)
        shown, rows = [tenth / 10 for tenth in range(1, 10) if start < tenth / 10 <= most], []
        for name, of_arm in curves.items():
            row = [name]
            for level in shown:
                firsts = (next((point.steps for point in curve if point.accuracy >= level), None) for curve in of_arm)
                known = [steps for steps in firsts if steps is not None]
                if len(known) == len(of_arm):
                    row.append(f"{fmean(known):,.0f}")
                else:  # the mean of the others would be too good
                    row.append(f"{len(known)} of {count(len(of_arm), 'seed')}" if known else NONE)
            rows.append(row)
        if shown:
            header = ("arm", *(f"{100 * level:.0f} %" for level in shown))
            title = f"Optimizer steps to reach an accuracy on {suite}"
            note = "Until it was first measured, mean over seeds; where only some seeds measured it, how many."
            tables.append(table(header, rows, title, note, "numbers"))
    return tables


def tries_table(tuning: Tuning) -> Table:
    """A row for each point of each arm, in the order of its grid, with its accuracy."""
    chosen = TableCell("chosen", (), "better")
    rows = (
        (arm.arm, each.point.text, _score(each.score, _FAILED), chosen if each is arm.chosen else "")
        for arm in tuning.arms
        for each in arm.tries
    )
    return table(("arm", "tried", f"accuracy on {tuning.select.on}", "decision"), rows, style="numbers")


def tuning_costs(tuning: Tuning) -> Table:
    """Total costs of all tries of each arm."""
    return costs_by_name("arm", {arm.arm: arm.costs for arm in tuning.arms})


def study_figure(findings: Findings) -> str:
    """Effects against the reference in every cell, as a self-contained SVG."""
    return picture(_effects(findings))


def accuracies_of_cells(findings: Findings, measured: Cell) -> Table:
    """Accuracy in percent on one suite: a row for each cell, a column for the base and each arm."""
    arms, rows = tuple(findings.design.arms), []
    for cell, own in findings.design.cells.items():
        if any(found := [findings.score(arm, measured, cell) for arm in ("", *arms)]):
            rows.append((own.label, *map(_score, found)))
    each = findings.repeated_over
    note = f"Accuracy in percent, mean over {each} and problems (each of the {each}):"
    return table(("situation", "base", *arms), rows, note=note, style="numbers")


def _grid_page(findings: Findings) -> Page:
    """Lines for one key or two, tables for any number."""
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
    sections = []
    for decoding in findings.decodings:
        drawn = (_grid_figure(findings, (suite, decoding)) for suite in findings.suites(decoding))
        tables = (accuracy_table(findings, decoding),)
        sections.append(Section(title=decoding, figures=tuple(filter(None, drawn)), tables=tables))
    seeds = ("seeds " if len(design.seeds) > 1 else "seed ") + ", ".join(map(str, design.seeds))
    return Page(
        design.name,
        f"{len(findings.arms)} points · {seeds} · {'; '.join(keys)}",
        (
            Section(title="Results", notes=tuple(notes), sections=tuple(sections)),
            Section(title="Costs", aside="of one seed, mean over seeds", tables=(cost_table(findings),)),
        ),
        "grid",
    )


def _grid_figure(findings: Findings, cell: Cell) -> Figure | None:
    """Over the values of the last key, a line for each value of another; None for more keys."""
    *first, (key, values) = (findings.design.grid or {}).items()
    if len(first) > 1:
        return None
    scores = [findings.score(arm.name, cell) for arm in findings.arms]
    found = [None if score is None else score.estimate for score in scores]
    names = [f"{name} {value_text(value)}" for name, of_first in first for value in of_first] or ["accuracy"]
    lines = {name: found[len(values) * row : len(values) * (row + 1)] for row, name in enumerate(names)}
    colors = dict(zip(names, cycle(_COLORS), strict=False))
    drawn = chart(_at_places(cell[0], key, [*map(value_text, values)], lines, colors))
    legend = tuple((color, name) for name, color in colors.items()) if first else ()
    return Figure(cell[0], "Mean accuracy with its interval.", drawn, legend)


def _comparison_page(findings: Findings) -> Page:
    """Arms against a reference: results, held-out accuracy, learning curves, tuning and costs."""
    design, tuning, confidence = findings.design, findings.tuning, f"{100 * findings.confidence:g} %"
    num_tests = len(findings.effects)
    notes: tuple[str, ...] = (
        f"Accuracy in percent, mean over seeds (in brackets) and problems. {confidence} intervals are over seeds and "
        "problems, what other seeds and another set of problems of the same kind would give: the interval over "
        "problems, and that of Student's t over the seeds, their distances from the mean added in squares. That of the "
        "base is over problems only.",
        "Differences are paired by seed and problem: the variance over seeds and the variance over problems added, and "
        "Student's t with Satterthwaite's degrees of freedom. Green and red ones are significant after Holm's "
        f"correction over all {num_tests} tests of this page, whose p-value stands beside them.",
    )
    if len(design.seeds) == 1:
        notes = (
            f"Accuracy in percent. There is one seed: {confidence} intervals and tests are over problems only, and say "
            "nothing about what another seed would give. Differences are paired by problem (Student's t); green and "
            f"red ones are significant after Holm's correction over all {num_tests} tests of this page.",
        )
    colors = {arm.name: color for arm, color in zip(findings.arms, cycle(_COLORS), strict=False)}
    results, of_models = [], {"": _BASE_COLOR, **colors}
    for decoding in findings.decodings:
        bands = []
        for suite in findings.suites(decoding):
            scores = [(color, findings.score(name, (suite, decoding))) for name, color in of_models.items()]
            bands.append((suite, [(color, each.estimate, [*each.by_seed.values()]) for color, each in scores if each]))
        legend = ((_BASE_COLOR, "base"), *((colors[arm.name], arm.name) for arm in findings.arms if arm.seeds))
        drawn = accuracy_figure(bands, legend)
        tables = accuracy_table(findings, decoding), difference_table(findings, decoding)
        results.append(Section(title=decoding, figures=(drawn,), tables=tuple(filter(None, tables))))
    sections = [_verdict(findings), Section(title="Results", anchor="results", notes=notes, sections=tuple(results))]

    figures = list[Figure]()
    for suite in dict.fromkeys(suite for arm in findings.arms for suite in arm.held_out):
        means = {arm.name: arm.held_out_mean(suite, findings.confidence) for arm in findings.arms}
        figures += _over_costs(suite, {name: points for name, points in means.items() if points}, colors)
    if figures:
        sections.append(
            Section(
                title="Held-out accuracy",
                aside="while training",
                anchor="held-out",
                figures=tuple(figures),
                tables=tuple(steps_to_reach(findings)),
            )
        )
    if curves := {arm.name: arm.curve for arm in findings.arms if arm.curve}:
        rewards, aside = tuple(_over_costs("", curves, colors)), "reward in training"
        sections.append(Section(title="Learning curves", aside=aside, anchor="curves", figures=rewards))
    sections += [] if tuning is None else [_tuning(tuning, colors)]
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
    assert design.budget is not None
    tuned = f" · tuned with {tuning.num_tries} tries each" if tuning else ""
    seeds = ", ".join(map(str, design.seeds))
    subtitle = f"{len(findings.arms)} arms · seeds {seeds} · {design.budget.text} each{tuned}"
    return Page(design.name, f"{subtitle} · reference {design.reference}", tuple(sections), "comparison")


def _verdict(findings: Findings) -> Section:
    """What came out on the first suite, what it rests on, and a warning where that are fewer than three seeds."""
    design, num_seeds = findings.design, len(findings.design.seeds)
    suite, decoding = findings.measured[0] if findings.measured else ("", "")
    words = []
    for arm in design.others:
        if (effect := findings.effect(ONLY_CELL, arm)) is not None:
            cell = difference(effect.result.difference, effect.adjusted_p)
            is_even = effect.verdict == "not distinguishable"
            where = f"{effect.verdict} {'from' if is_even else 'of' if effect.verdict == 'ahead' else ''}".strip()
            words.append(f"{arm} is {where} {design.reference} ({cell.text} {', '.join(cell.details)})")
    found = [score for arm in design.arms if (score := findings.score(arm, (suite, decoding))) is not None]
    verdict = f"On {suite} ({decoding}), in percentage points: {'; '.join(words)}." if words else ""
    budget = "" if design.budget is None else f", {design.budget.text} each"
    problems = f", {count(found[0].estimate.num_problems, 'problem')}" if found else ""
    basis = f"{count(len(design.arms), 'arm')} with {count(num_seeds, 'seed')}{budget}{problems}."
    few = (
        f"{count(num_seeds, 'seed')}: fewer than three do not show how far seeds differ; add seeds before you rely on "
        "a difference.",
    )
    return Section(warnings=few if num_seeds < _MIN_SEEDS else (), text=(f"{verdict} {basis}".strip(),))


def _over_costs(
    suite: str, curves: Mapping[str, Sequence[HeldOutPoint] | Sequence[CurvePoint]], colors: Mapping[str, str]
) -> Iterator[Figure]:
    """The curves of arms over each of `_OVER`: held-out accuracy on `suite`, or for "" the reward in training."""
    measured = ("accuracy", "low", "high") if suite else ("reward",)
    shares = all(0 <= getattr(point, measured[0]) <= 1 for points in curves.values() for point in points)
    legend = tuple((colors[name], name) for name in curves)
    for over, (place, title, note) in _OVER.items():
        lines = [
            Line(name, colors[name], *([getattr(point, each) for point in points] for each in (place, *measured)))
            for name, points in curves.items()
        ]
        drawn = chart(Chart(title, lines, over=over, percent=shares))
        yield Figure(f"{suite} {title.lower()}" if suite else title, _HELD_OUT_NOTE if suite else note, drawn, legend)


def _tuning(tuning: Tuning, colors: Mapping[str, str]) -> Section:
    """What was tried, with a figure for each key that is the only key in the grids of some arms."""
    by_key: dict[str, dict[str, dict[str, Estimate | None]]] = {}
    for arm in tuning.arms:
        for each in arm.tries if len(arm.tries[0].point.values) == 1 else ():
            ((key, value),) = each.point.values
            of_arm = by_key.setdefault(key, {}).setdefault(arm.arm, {})
            of_arm[value_text(value)] = None if each.score is None else each.score.estimate
    figures = []
    for key, arms in by_key.items():
        places = list(dict.fromkeys(place for of_arm in arms.values() for place in of_arm))
        found = {arm: [of_arm.get(place) for place in places] for arm, of_arm in arms.items()}
        if any(any(of_arm) for of_arm in found.values()):
            drawn = chart(_at_places(key, key, places, found, colors))
            legend = tuple((colors[arm], arm) for arm in found)
            figures.append(Figure(key, "Accuracy of each try, with its interval.", drawn, legend))
    select, tries = tuning.select, f"{tuning.num_tries} tries" if tuning.num_tries > 1 else "1 try"
    ran = f"seed{'s' if len(select.seeds) > 1 else ''} {', '.join(map(str, select.seeds))}"
    words = (
        f"Every arm had {tries}, each run with {ran} and evaluated only on {select.on} ({tuning.decoding}); "
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
        figures=tuple(figures),
        tables=(tries_table(tuning), costs),
    )


def _name(findings: Findings, arm: ArmResults) -> TableCell:
    """An arm with its recipe, or a grid's point; with the number of finished seeds where some have failed."""
    num_seeds = len(findings.design.seeds)
    if not findings.design.arms:
        done = f"{len(arm.seeds)} of {count(num_seeds, 'seed')} finished"
        return TableCell(arm.name, (done,), "worse") if arm.failures else TableCell(arm.name)
    own = findings.design.arms[arm.name]
    recipe = ", ".join(dict.fromkeys(filter(None, (own.chain, own.method))))
    chosen = findings.tuning.chosen(arm.name) if findings.tuning is not None else None
    recipe += f", {chosen.point.text}" if chosen is not None else ""
    if not arm.failures:
        return TableCell(arm.name, (recipe,))
    failed = f"{len(arm.seeds)} of {num_seeds} seeds, the others failed" if arm.seeds else "all seeds failed"
    return TableCell(arm.name, (f"{recipe};", failed), "worse")


def _score(score: Score | None, missing: TableCell | None = None) -> TableCell:
    if score is None:
        return missing or accuracy(None)
    return accuracy(score.estimate, score.by_seed.values())


def _effect(effect: Effect | None, *, in_study: bool = False) -> TableCell:
    """A difference with its p-value; in a study also whether its test was planned."""
    if effect is None:
        return TableCell(NONE)
    found, tone = effect.result.difference, _TONES[effect.verdict]
    if not in_study:
        return difference(found, effect.adjusted_p, tone=tone)
    p = "<0.001" if effect.p_value < 0.001 else f"{effect.p_value:.3f}"
    return difference(found, notes=(f"p {p}{_PLANNED if effect.is_planned else ''}",), tone=tone)


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


def study_page(findings: Findings, results: SweepResults) -> Page:
    """The page of a study: effects in every cell, and what was tried and spent."""
    design, confidence = findings.design, f"{100 * findings.confidence:g} %"
    figures = (Figure(each.title, "", chart(each)) for each in _effects(findings))
    (suite, decoding), repeated = findings.measured[0], findings.repeated_over
    note = (
        f"Percentage points minus {design.reference} with {confidence} intervals over {repeated} and problems, "
        f"uncorrected. The p-value of a planned test ({_PLANNED}) is after Holm's correction over all planned tests; "
        "everything else is exploratory."
    )
    title, aside = f"Effect against {design.reference}", f"{suite}, {decoding}"
    sections = [Section(title=title, aside=aside, notes=(note,), figures=tuple(figures))]
    if design.planned:
        missing = f"{len(findings.missing)} of {len(design.planned)} planned tests have no results yet; they count in "
        notes = (f"{missing}the correction.",) if findings.missing else ()
        sections.append(Section(title="Planned tests", notes=notes, tables=(_planned(findings),)))
    for on in findings.measured:
        rows = []
        for cell, own in design.cells.items():
            if any(effects := [findings.effect(cell, arm, on) for arm in design.others]):
                rows.append((own.label, *(_effect(each, in_study=True) for each in effects)))
        header = f"minus {design.reference}", *design.others
        note = f"Differences in percentage points ({_PLANNED} planned):"
        tables = accuracies_of_cells(findings, on), table(header, rows, note=note, style="numbers")
        sections.append(Section(title=", ".join(on), tables=tables))
    if (tuned := _tried_of_cells(findings, results)).rows:
        sections.append(Section(title="Tuning", tables=(tuned,)))
    sections.append(Section(title="Costs of a run", tables=(_costs_of_cells(findings, results),)))
    if design.limits:
        sections.append(Section(title="Limits", text=tuple(design.limits)))
    assert design.budget is not None
    seeds = [", ".join(map(str, design.seeds))]
    seeds += [f"{', '.join(map(str, each.seeds))} in {each.label}" for each in design.cells.values() if each.seeds]
    num_run = len(accuracies_of_cells(findings, findings.measured[0]).rows)
    subtitle = (
        f"{num_run} of {len(design.cells)} cells · {len(design.arms)} arms · {design.budget.text} · "
        f"{repeated} {'; '.join(seeds)}"
    )
    return Page(design.name, subtitle, tuple(sections), "study")


def _planned(findings: Findings) -> Table:
    """The planned tests, with what Holm's correction leaves of them."""
    rows: list[tuple[str | TableCell, ...]] = []
    for cell, arm, against in findings.design.planned:
        found: tuple[str | TableCell, ...] = NONE, NONE, "not run yet"
        effect = findings.effect(cell, arm, against=against)
        if effect is not None and not effect.is_planned:
            found = NONE, NONE, f"{len(effect.seeds)} of its {findings.repeated_over} yet"
        elif effect is not None:
            p = "< 0.001" if effect.p_value < 0.001 else f"{effect.p_value:.3f}"
            verdict = TableCell(effect.verdict, (), _TONES[effect.verdict])
            found = difference(effect.result.difference), p, verdict
        rows.append((findings.design.cells[cell].label, arm, against, *found))
    return table(("situation", "arm", "against", "difference", "p, corrected", "verdict"), rows)


def _tried_of_cells(findings: Findings, results: SweepResults) -> Table:
    """What was tried for each arm and what was chosen; without rows where nothing was tuned."""
    cells, chosen, tried = (
        findings.design.cells,
        results.chosen,
        results.where(role=[TRIED]).measures.query("measure == 'accuracy'"),
    )
    means = tried.groupby(["cell", "arm", "point", "values"], sort=False)["value"].mean().reset_index()
    rows = (
        (cells[cell].label, arm, values, percent(mean), "yes" if chosen.get((cell, arm)) == point else "")
        for cell, arm, point, values, mean in means.itertuples(index=False, name=None)
    )
    return table(("tuned at", "arm", "values", "accuracy on validation", "chosen"), rows)


def _costs_of_cells(findings: Findings, results: SweepResults) -> Table:
    """Mean seconds and sampled tokens of a reported run over seeds; the budget decides the rest."""
    means = results.where(role=[REPORTED]).measures.groupby(["cell", "arm", "measure"])["value"].mean().to_dict()

    def of_run(cell: str, arm: str) -> str:
        seconds, tokens = (means.get((cell, arm, measure)) for measure in ("seconds", "generated_tokens"))
        return NONE if seconds is None else f"{seconds:,.0f}" + (f" ({tokens / 1000:,.0f}k)" if tokens else "")

    arms = tuple(findings.design.arms)
    rows = [
        (own.label, *(of_run(cell, arm) for arm in arms))
        for cell, own in findings.design.cells.items()
        if any((cell, arm, "seconds") in means for arm in arms)
    ]
    note = f"Seconds of training, in brackets thousands of sampled tokens; means over {findings.repeated_over}:"
    return table(("situation", *arms), rows, note=note, style="numbers")


def _effects(findings: Findings) -> list[Chart]:
    """A forest of the arms for each cell that has results, all on one scale."""
    design, charts = findings.design, []
    for cell, own in design.cells.items():
        if found := {arm: effect for arm in design.others if (effect := findings.effect(cell, arm))}:
            arms = [f"{arm}{_PLANNED if effect.is_planned else ''}" for arm, effect in found.items()]
            effects = [effect.result.difference for effect in found.values()]
            line = estimates(own.label, "c1", range(len(arms)), effects)
            charts.append(Chart(own.label, [line], over=f"percentage points minus {design.reference}", places=arms))
    span = max((abs(end) for each in charts for line in each.lines for end in (*line.low, *line.high)), default=0.0)
    return [replace(each, span=span or 1.0) for each in charts]

"""How the arms of a comparison were tuned: what was tried, what was chosen, and what it cost."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from luffy.config.many_runs.grid import value_text
from luffy.evaluation.method_comparison.arms import Costs
from luffy.evaluation.method_comparison.seed_scores import Score
from luffy.evaluation.method_comparison.tuning import ArmTuning, Try, Tuning
from luffy.pages.cost_tables import costs_by_name
from luffy.pages.panels import Figure
from luffy.pages.plotter import Dot, place_plot
from luffy.pages.score_cells import score_cell
from luffy.pages.tables import Table, TableCell


@dataclass(frozen=True, slots=True)
class TuningSection:
    """A section of the page of a comparison."""

    words: str
    """How values were chosen."""
    warnings: list[str]
    tries: Table
    figures: list[Figure]
    """One figure for each rung and each key that is the only key in the grids of some arms."""
    costs: Table


def tuning_section(tuning: Tuning, colors: Mapping[str, str]) -> TuningSection:
    """The section, with the colour of each arm."""
    return TuningSection(
        _words(tuning), tuning.warnings, tries_table(tuning), _figures(tuning, colors), tuning_costs(tuning)
    )


def tries_table(tuning: Tuning) -> Table:
    """A row for each point of each arm, in the order of its grid, with its accuracy on each rung."""
    rows = [
        (
            TableCell(arm.arm),
            TableCell(each.point.text),
            *(_accuracy(rung, each) for rung in arm.rungs),
            _decision(tuning, arm, each),
        )
        for arm in tuning.arms
        for each in arm.tries
    ]
    halving, on = tuning.halving, f"accuracy on {tuning.on}"
    measured = [on] if halving is None else [f"{on}, {length} {halving.unit}" for length in halving.lengths]
    return Table(("arm", "tried", *measured, "decision"), tuple(rows))


def tuning_costs(tuning: Tuning) -> Table:
    """Total costs of all tries of each arm; with rungs, also the costs if every try had got the whole budget."""
    costs = dict[str, Costs | None]()
    for arm in tuning.arms:
        costs[arm.arm] = arm.costs
        if (full := tuning.costs_of_full_grid(arm)) is not None:
            costs[f"{arm.arm}, full grid (estimate)"] = full
    return costs_by_name("arm", costs)


def _accuracy(rung: Sequence[Try], of: Try) -> TableCell:
    there = next((each for each in rung if each.point == of.point), None)
    if there is None:
        return TableCell("–")
    return score_cell(there.score) if there.score is not None else TableCell("failed", (), "worse")


def _decision(tuning: Tuning, arm: ArmTuning, each: Try) -> TableCell:
    if each is arm.chosen:
        return TableCell("chosen", (), "better")
    reached = sum(any(other.point == each.point for other in rung) for rung in arm.rungs)
    return TableCell("" if tuning.halving is None or reached == len(arm.rungs) else f"dropped after rung {reached}")


def _words(tuning: Tuning) -> str:
    tries, seeds = f"{tuning.num_tries} tries" if tuning.num_tries > 1 else "1 try", ", ".join(map(str, tuning.seeds))
    drawn = ", drawn at random from its grid" if tuning.is_random else ""
    ran = f"seed {seeds}" if len(tuning.seeds) == 1 else f"seeds {seeds}"
    return (
        f"Every arm had {tries}{drawn}, each run with {ran} and evaluated only on {tuning.on} ({tuning.decoding}); "
        f"nothing that is reported above was used. {_words_of_halving(tuning)}The highest mean accuracy"
        f"{'' if tuning.halving is None else ' of the last rung'} was chosen, of equal ones the first in the grid."
    )


def _words_of_halving(tuning: Tuning) -> str:
    halving = tuning.halving
    if halving is None:
        return ""
    failed = any(each.failures for arm in tuning.arms for each in arm.tries)
    first, *later = zip(halving.num_tries, halving.lengths, strict=True)
    went_on = ", ".join(f"the best {count} to {length}" for count, length in later)
    return (
        f"Successive halving, reduction factor {halving.eta}: {first[0]} tries trained for {first[1]} {halving.unit}, "
        f"and went on, {went_on}{', fewer where tries failed' if failed else ''}. "
    )


def _figures(tuning: Tuning, colors: Mapping[str, str]) -> list[Figure]:
    keys = {arm.arm: _only_key(arm) for arm in tuning.arms}
    lengths = [""] if tuning.halving is None else [f"{each} {tuning.halving.unit}" for each in tuning.halving.lengths]
    found = [
        _figure(key, place, length, [arm for arm in tuning.arms if keys[arm.arm] == key], colors)
        for key in dict.fromkeys(key for key in keys.values() if key)
        for place, length in enumerate(lengths)
    ]
    return [figure for figure in found if figure is not None]


def _figure(key: str, rung: int, length: str, arms: Sequence[ArmTuning], colors: Mapping[str, str]) -> Figure | None:
    """Accuracies on one rung by the values of `key`; None where no try of it has finished."""
    places = list(dict.fromkeys(_value(each) for arm in arms for each in arm.tries))
    lines = [(colors[arm.arm], [_dot(arm.rungs[rung], place, colors[arm.arm]) for place in places]) for arm in arms]
    if not any(dot for _, dots in lines for dot in dots):
        return None
    legend = tuple((colors[arm.arm], arm.arm) for arm in arms)
    title, name = (f"{key} after {length}", f"tries-{key}-{rung}") if length else (key, f"tries-{key}")
    return Figure(title, "Accuracy of each try, with its interval.", legend, place_plot(name, places, lines, key))


def _only_key(arm: ArmTuning) -> str:
    """The key of a grid that has one; else empty."""
    values = arm.tries[0].point.values
    return values[0][0] if len(values) == 1 else ""


def _value(each: Try) -> str:
    return value_text(each.point.values[0][1])


def _dot(tries: Sequence[Try], place: str, color: str) -> Dot | None:
    score: Score | None = next((each.score for each in tries if _value(each) == place), None)
    return None if score is None else Dot(color, score.estimate.value, score.estimate.low, score.estimate.high)

"""How the arms of a comparison were tuned: what was tried, what was chosen, and what it cost."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from luffy.config.many_runs.grid import value_text
from luffy.evaluation.method_comparison.seed_scores import Score
from luffy.evaluation.method_comparison.tuning import ArmTuning, Try, Tuning
from luffy.report.cost_tables import costs_by_name
from luffy.report.panels import Figure
from luffy.report.plotter import Dot, place_plot
from luffy.report.score_cells import score_cell
from luffy.report.tables import Table, TableCell


@dataclass(frozen=True, slots=True)
class TuningSection:
    """A section of the page of a comparison."""

    words: str
    """How values were chosen."""
    warnings: list[str]
    tries: Table
    figures: list[Figure]
    """One figure for each key that is the only key in the grids of some arms."""
    costs: Table


def tuning_section(tuning: Tuning, colors: Mapping[str, str]) -> TuningSection:
    """The section, with the colour of each arm."""
    return TuningSection(
        _words(tuning), tuning.warnings, tries_table(tuning), _figures(tuning, colors), tuning_costs(tuning)
    )


def tries_table(tuning: Tuning) -> Table:
    """A row for each point of each arm, in the order of its grid, with its accuracy."""
    rows = [
        (
            TableCell(arm.arm),
            TableCell(each.point.text),
            score_cell(each.score) if each.score is not None else TableCell("failed", (), "worse"),
            TableCell("chosen", (), "better") if each is arm.chosen else TableCell(""),
        )
        for arm in tuning.arms
        for each in arm.tries
    ]
    return Table(("arm", "tried", f"accuracy on {tuning.on}", "decision"), tuple(rows))


def tuning_costs(tuning: Tuning) -> Table:
    """Total costs of all tries of each arm."""
    return costs_by_name("arm", {arm.arm: arm.costs for arm in tuning.arms})


def _words(tuning: Tuning) -> str:
    tries, seeds = f"{tuning.num_tries} tries" if tuning.num_tries > 1 else "1 try", ", ".join(map(str, tuning.seeds))
    drawn = ", drawn at random from its grid" if tuning.is_random else ""
    ran = f"seed {seeds}" if len(tuning.seeds) == 1 else f"seeds {seeds}"
    return (
        f"Every arm had {tries}{drawn}, each run with {ran} and evaluated only on {tuning.on} ({tuning.decoding}); "
        "nothing that is reported above was used. The highest mean accuracy was chosen, of equal ones the first in the "
        "grid."
    )


def _figures(tuning: Tuning, colors: Mapping[str, str]) -> list[Figure]:
    keys = {arm.arm: _only_key(arm) for arm in tuning.arms}
    found = [
        _figure(key, [arm for arm in tuning.arms if keys[arm.arm] == key], colors)
        for key in dict.fromkeys(key for key in keys.values() if key)
    ]
    return [figure for figure in found if figure is not None]


def _figure(key: str, arms: Sequence[ArmTuning], colors: Mapping[str, str]) -> Figure | None:
    """Accuracies by the values of `key`; None where no try has finished."""
    places = list(dict.fromkeys(_value(each) for arm in arms for each in arm.tries))
    lines = [(colors[arm.arm], [_dot(arm.tries, place, colors[arm.arm]) for place in places]) for arm in arms]
    if not any(dot for _, dots in lines for dot in dots):
        return None
    legend = tuple((colors[arm.arm], arm.arm) for arm in arms)
    plot = place_plot(f"tries-{key}", places, lines, key)
    return Figure(key, "Accuracy of each try, with its interval.", legend, plot)


def _only_key(arm: ArmTuning) -> str:
    """The key of a grid that has one; else empty."""
    values = arm.tries[0].point.values
    return values[0][0] if len(values) == 1 else ""


def _value(each: Try) -> str:
    return value_text(each.point.values[0][1])


def _dot(tries: Sequence[Try], place: str, color: str) -> Dot | None:
    score: Score | None = next((each.score for each in tries if _value(each) == place), None)
    return None if score is None else Dot(color, score.estimate.value, score.estimate.low, score.estimate.high)

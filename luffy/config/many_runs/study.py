"""A study: one comparison of methods in each of several cells, which lie around a centre.

A cell is the centre, one other level of one axis, or a named interaction. Each is an ordinary comparison, with all of
its rules (`luffy.config.many_runs.comparison`); runs that are equal in several cells are made once.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from pydantic import ValidationError

from luffy.config.experiment import ExperimentConfig
from luffy.config.load import read_overridden, refuse_other_kind
from luffy.config.many_runs.arm_run import ArmRun, is_made_as
from luffy.config.many_runs.comparison import Candidate, Comparison, comparison_of_values
from luffy.config.many_runs.grid import GridPoint
from luffy.config.many_runs.study_config import CENTRE, LevelConfig, StudyConfig
from luffy.config.shipped import experiment_file
from luffy.config.validation_errors import explain
from luffy.config.yaml_source import KeyPath, Value
from luffy.errors import ConfigError

Chosen = Mapping[str, Mapping[str, int]]
"""Number of the chosen point by the cell that was tuned and by arm; an arm is missing while no try of it finished."""


@dataclass(frozen=True, slots=True)
class CellRun:
    """One run of a cell."""

    cell: str
    run: ArmRun
    """The run as the cell's comparison defines it."""
    point: GridPoint
    """The point that is tried, or that tuning chose."""

    @property
    def is_tuning(self) -> bool:
        return self.run.point is not None

    @property
    def made_as(self) -> str:
        """Digest of everything that the result depends on; equal for runs with the same result."""
        return hashlib.sha256(is_made_as(self.run.config).encode()).hexdigest()

    @property
    def titled(self) -> ArmRun:
        """The run under a name that no other cell has."""
        return replace(self.run, arm=f"{self.cell}.{self.run.arm}")


@dataclass(frozen=True)
class Study:
    """A loaded study; each cell is loaded and checked at its first use."""

    config: StudyConfig
    path: Path
    values: dict[str, Value]
    origins: Mapping[KeyPath, str]
    _loaded: dict[str, Comparison] = field(default_factory=dict)

    @cached_property
    def cells(self) -> dict[str, dict[str, str]]:
        """The level of each axis, by cell."""
        return self.config.cells

    @property
    def common(self) -> ExperimentConfig:
        """The experiment under which the study is recorded."""
        return self.comparison(CENTRE).shared.model_copy(update={"name": self.config.name})

    def selected(self, names: Iterable[str]) -> tuple[str, ...]:
        """The cells of these names in the design's order, all for none; ConfigError where there is no such cell."""
        wanted = set(names) or set(self.cells)
        if unknown := sorted(wanted - set(self.cells)):
            raise ConfigError(f"{self.path}: no cell is called {unknown[0]!r}; there are {', '.join(self.cells)}")
        return tuple(cell for cell in self.cells if cell in wanted)

    def tuned_cell(self, cell: str) -> str | None:
        """The cell whose tuning holds in `cell`; None where nothing is tuned."""
        if self.config.select is None:
            return None
        return cell if self.config.tuned_at == "cell" else CENTRE

    def seeds(self, cell: str) -> tuple[int, ...]:
        """Reported seeds."""
        return self.config.seeds if cell == CENTRE else self.config.seeds_elsewhere

    def comparison(self, cell: str, points: Mapping[str, GridPoint] | None = None) -> Comparison:
        """The comparison in `cell`, tuned there, or with its arms at the `points` that were chosen elsewhere."""
        key = cell + json.dumps({arm: point.number for arm, point in (points or {}).items()})
        if key not in self._loaded:
            try:
                self._loaded[key] = comparison_of_values(self._values(cell, points), self._origins(cell), self.path)
            except ConfigError as error:
                raise ConfigError(f"cell {cell}: {str(error).splitlines()[0]}") from None
        return self._loaded[key]

    def tuning_runs(self, cells: Iterable[str]) -> list[CellRun]:
        """Every try that the cells need."""
        tuned = dict.fromkeys(found for cell in cells if (found := self.tuned_cell(cell)) is not None)
        return [
            CellRun(cell, run, run.point)
            for cell in tuned
            for run in self.comparison(cell).tuning_runs
            if run.point is not None
        ]

    def reported_runs(self, cells: Iterable[str], chosen: Chosen) -> list[CellRun]:
        """Every arm with every seed, without the arms for which nothing is chosen yet; whole cells, seed by seed."""
        return [run for cell in cells for run in self._reported(cell, chosen)]

    def first_points(self) -> Chosen:
        """The first point of each arm as the chosen one, to count and check runs before anything is tuned."""
        firsts = {name: candidates[0].point.number for name, candidates in self._points(CENTRE).items()}
        return {cell: firsts for cell in self.cells if self.tuned_cell(cell) == cell}

    def check(self, cells: Iterable[str]) -> None:
        """Raise ConfigError, one line, where the comparison of a cell has a mistake."""
        chosen = self.first_points()
        centre = self.comparison(CENTRE).candidates[0].config
        evaluation, primary = centre.evaluation, self.config.primary
        where = self.origins.get(("primary",), str(self.path))
        if primary.suite not in centre.data.suites:
            raise ConfigError(f"{where}: primary.suite: no suite is called {primary.suite!r}")
        if evaluation is None or primary.decoding not in evaluation.decodings:
            raise ConfigError(f"{where}: primary.decoding: no decoding is called {primary.decoding!r}")
        for cell in cells:
            self._reported(cell, chosen)

    def _reported(self, cell: str, chosen: Chosen) -> Iterator[CellRun]:
        tuned = self.tuned_cell(cell)
        if tuned is None:
            comparison, points = self.comparison(cell), {}
        else:
            numbers = chosen.get(tuned, {})
            candidates = {
                name: next(each for each in found if each.point.number == numbers[name])
                for name, found in self._points(tuned).items()
                if name in numbers
            }
            points = {name: each.point for name, each in candidates.items()}
            comparison = self.comparison(cell, None if tuned == cell else points)
        picked = {
            name: self._candidate(comparison, name, points.get(name))
            for name in self.config.arms
            if tuned is None or name in points
        }
        runs = comparison.reported_runs(picked)
        return iter([CellRun(cell, run, points.get(run.arm, picked[run.arm].point)) for run in runs])

    def _points(self, cell: str) -> dict[str, tuple[Candidate, ...]]:
        comparison = self.comparison(cell)
        return {name: comparison.candidates_of(name) for name in self.config.arms}

    def _candidate(self, comparison: Comparison, arm: str, point: GridPoint | None) -> Candidate:
        candidates = comparison.candidates_of(arm)
        return next((each for each in candidates if each.point == point), candidates[0])

    def _values(self, cell: str, points: Mapping[str, GridPoint] | None) -> dict[str, Value]:
        study, levels = self.config, self._levels(cell)
        budget = next((each.budget for each in levels if each.budget is not None), study.budget)
        sft_steps = next((each.sft_steps for each in levels if each.sft_steps is not None), None)
        values = study.model_dump(mode="json", include={"experiment", "overrides", "reference", "workers", "arms"})
        values |= {
            "name": f"{study.name}.{cell}",
            "overrides": [*study.overrides, *(text for each in levels for text in each.overrides)],
            "seeds": list(self.seeds(cell)),
            "budget": budget.model_dump(mode="json"),
        }
        for name, arm in values["arms"].items():
            if sft_steps is not None and arm["sft_steps"] is not None:
                arm["sft_steps"] = sft_steps
            if points is not None:
                arm["grid"] = None
                arm["overrides"] += points[name].overrides if name in points else []
        if study.select is not None and points is None:
            values |= study.model_dump(mode="json", include={"select", "grid"})
        return values

    def _levels(self, cell: str) -> list[LevelConfig]:
        """The cell's levels; those of axes that leave the centre come last, so that theirs win."""
        axes = self.config.axes
        at = sorted(self.cells[cell].items(), key=lambda item: item[1] != axes[item[0]].centre)
        return [axes[name].levels[level] for name, level in at]

    def _origins(self, cell: str) -> dict[KeyPath, str]:
        """The place of each key of a comparison in the design file; overrides come from the cell's own level."""
        origins = {key: where for key, where in self.origins.items() if key[0] != "overrides"}
        centre = self.cells[CENTRE]
        for axis, level in self.cells[cell].items():
            if level != centre[axis] or cell == CENTRE:
                place = origins.get(("axes", axis, "levels", level), str(self.path))
                origins[("overrides",)] = f"{place}: axes.{axis}.levels.{level}"
        return origins


def load_study(path: Path | str) -> Study:
    """The study in the file `path`, or the shipped one of that name.

    Raises ConfigError with one line for each mistake of the design; those of its cells are found by `Study.check`.
    """
    file = experiment_file(path)
    values, origins = read_overridden(file)
    refuse_other_kind(values, path, "study")
    try:
        config = StudyConfig.model_validate_json(json.dumps(values))
    except ValidationError as error:
        raise ConfigError(explain(error, StudyConfig, origins, default_where=str(file), values=values)) from None
    return Study(config, file, values, origins)


def distinct(runs: Iterable[CellRun]) -> list[CellRun]:
    """`runs` without duplicates (equal `made_as`), in order."""
    return list({each.made_as: each for each in reversed(list(runs))}.values())[::-1]

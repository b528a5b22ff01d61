"""The YAML file of many runs: a grid, a comparison of methods (with `arms`) or a study (also with `cells`)."""

import itertools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Self

from pydantic import AfterValidator, Field, JsonValue, NonNegativeInt, PositiveInt, ValidationInfo, model_validator

from luffy.config.evaluation import VALIDATION
from luffy.config.load import FileKind
from luffy.config.strict import RunName, StrictModel
from luffy.config.yaml_source import flow_yaml, not_among

ONLY_CELL = "only"
"""Name of the cell of a grid or a comparison, which have one alone."""
_OF_GRIDS = {"name", "experiment", "overrides", "seeds", "workers", "grid"}
_OF_COMPARISONS = {*_OF_GRIDS, "reference", "budget", "select", "arms"}
_NEEDED: Mapping[FileKind, tuple[str, ...]] = {
    "grid": ("grid",),
    "comparison": ("reference", "budget", "arms"),
    "study": ("reference", "budget", "arms", "primary"),
}


def _each_once(values: tuple[JsonValue, ...]) -> tuple[JsonValue, ...]:
    seen = set[str]()
    for value in values:
        if (text := json.dumps(value, sort_keys=True)) in seen:
            raise ValueError(f"{text} is listed twice; give each value once")
        seen.add(text)
    return values


_DashedName = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_-]*$")]
_Seeds = Annotated[tuple[NonNegativeInt, ...], Field(min_length=1), AfterValidator(_each_once)]
_GridValues = Annotated[tuple[JsonValue, ...], Field(min_length=1), AfterValidator(_each_once)]
Grid = Annotated[dict[str, _GridValues], Field(min_length=1)]
"""Values to try by `key.path`; every combination of them is a point."""


@dataclass(frozen=True, slots=True)
class GridPoint:
    """One value for each key of a grid."""

    number: int
    """Place in the grid, from 1; the values of the last key change fastest."""
    values: tuple[tuple[str, JsonValue], ...]

    @property
    def overrides(self) -> list[str]:
        return [f"{key}={flow_yaml(value)}" for key, value in self.values]

    @property
    def text(self) -> str:
        """The values for display; empty without a key."""
        return ", ".join(f"{key}={value_text(value)}" for key, value in self.values)


def value_text(value: JsonValue) -> str:
    """A value as people write it: `0.0004`, `cosine`, `{kind: constant}`."""
    return f"{value:g}" if isinstance(value, float) else flow_yaml(value)


def grid_points(grid: Grid | None) -> tuple[GridPoint, ...]:
    """Every combination, the values of the last key changing fastest; one empty point without a grid."""
    grid = grid or {}
    combinations = enumerate(itertools.product(*grid.values()), start=1)
    return tuple(GridPoint(number, tuple(zip(grid, values, strict=True))) for number, values in combinations)


class BudgetConfig(StrictModel):
    """How much every arm learns."""

    optimizer_steps: PositiveInt
    """Optimizer steps after the base policy, those of SFT (in all of its rounds) and of RL together."""

    @property
    def text(self) -> str:
        return f"{self.optimizer_steps} optimizer steps"


class SelectConfig(StrictModel):
    """How each arm's values are chosen: by runs of equally many points, evaluated on nothing that is reported."""

    on: str = VALIDATION
    """`validation`: the prompts of `data.validation_prompts` (always in a study), or a suite, which is not reported."""
    seeds: _Seeds
    """Seeds of the runs that are chosen from; none of them is reported."""
    decoding: str | None = None
    """The decoding whose accuracy, mean over seeds and problems, decides; None: the experiment's first."""


class ArmConfig(StrictModel):
    """An arm: a chain, a method and overrides."""

    chain: str
    """A preset of `exp_configs/chains/`."""
    method: str | None = None
    """A preset of `exp_configs/methods/`; in a chain with RL, the method of RL. None: its stages name theirs."""
    sft_steps: PositiveInt | None = None
    """Optimizer steps of SFT, in all rounds, where RL follows; None: there is none before RL."""
    overrides: tuple[str, ...] = ()
    """`key.path=value`, for this arm alone."""
    grid: Grid | None = None
    """Values to try, by key; None: those of the file's own `grid`."""


class CellConfig(StrictModel):
    """A situation in which a study compares its arms; what it leaves out is the study's own."""

    label: Annotated[str, Field(min_length=1)]
    """Its name in tables and figures."""
    overrides: tuple[str, ...] = ()
    """`key.path=value`, for all arms; they come after the study's, and before those of an arm."""
    seeds: _Seeds | None = None
    budget: BudgetConfig | None = None
    sft_steps: PositiveInt | None = None
    """Steps of SFT in the arms that have SFT before RL; None: each arm's own `sft_steps`."""


class PrimaryConfig(StrictModel):
    """The measure of the planned tests."""

    suite: str
    decoding: str


class PlannedConfig(StrictModel):
    """Planned tests: each of `arms` against another in each of `cells`, on the primary measure."""

    cells: tuple[_DashedName, ...] = Field(min_length=1)
    arms: tuple[str, ...] = Field(min_length=1)
    against: str | None = None
    """None: the reference."""


class SweepDesign(StrictModel):
    """Many runs of one experiment: a grid, a comparison (`arms`), or a study (`arms` in `cells`)."""

    name: RunName
    experiment: str
    """YAML file of the experiment that all runs start from: a path relative to this folder, or a shipped name."""
    overrides: tuple[str, ...] = ()
    """`key.path=value`, for all runs."""
    seeds: _Seeds
    """Seeds of everything after the base: order of prompts, choice of traces, responses. Data, base and evaluation keep
    the experiment's seed."""
    workers: PositiveInt = 1
    """Number of concurrent runs. Affects their time, never their results."""
    grid: Grid | None = None
    """Values by `key.path`, every combination is a point: of a grid, or of every arm that has no grid of its own."""
    reference: str = ""
    """The arm that all others are tested against."""
    budget: BudgetConfig | None = None
    select: SelectConfig | None = None
    """How each arm's values are chosen from its grid; None: nothing is tuned."""
    arms: dict[_DashedName, ArmConfig] = Field(default_factory=dict, min_length=2, validate_default=False)
    cells: dict[_DashedName, CellConfig] = Field(default_factory=dict, min_length=1, validate_default=False)
    """A study's situations, in the order of its page."""
    tuned_at: str | None = None
    """The cell of a study whose chosen values hold in all; None: every cell chooses its own."""
    primary: PrimaryConfig | None = None
    tests: tuple[PlannedConfig, ...] = ()
    """A study's planned tests: Holm's correction is over these alone; every other difference is exploratory."""
    limits: tuple[str, ...] = ()
    """Limitations of a study's results; each is a paragraph of the page."""

    @property
    def kind(self) -> FileKind:
        return "study" if self.cells else "comparison" if self.arms else "grid"

    @property
    def others(self) -> tuple[str, ...]:
        return tuple(name for name in self.arms if name != self.reference)

    @property
    def planned(self) -> tuple[tuple[str, str, str], ...]:
        """Cell, arm, and the arm that it is tested against."""
        pairs = ((each, cell, arm) for each in self.tests for cell in each.cells for arm in each.arms)
        return tuple((cell, arm, each.against or self.reference) for each, cell, arm in pairs)

    def in_cell(self, cell: str, points: Mapping[str, GridPoint] | None = None) -> "SweepDesign":
        """The comparison in a cell of a study: tuned there, or with its arms at the `points` chosen elsewhere. Later
        overrides win: the study's, the cell's, the arm's, its point's."""
        here, arms = self.cells[cell], dict(self.arms)
        for name, arm in arms.items():
            own: dict[str, object] = {} if arm.sft_steps is None else {"sft_steps": here.sft_steps or arm.sft_steps}
            if points is not None:
                chosen = points[name].overrides if name in points else []
                own |= {"grid": None, "overrides": (*arm.overrides, *chosen)}
            arms[name] = arm.model_copy(update=own)
        return self.model_copy(
            update={
                "name": f"{self.name}.{cell}",
                "overrides": (*self.overrides, *here.overrides),
                "seeds": here.seeds or self.seeds,
                "budget": here.budget or self.budget,
                "arms": arms,
                **({"select": None, "grid": None} if points is not None else {}),
            }
        )

    @model_validator(mode="after")
    def _consistent(self, info: ValidationInfo) -> Self:
        kind: FileKind = (info.context or {}).get("kind", self.kind)
        allowed = {"grid": _OF_GRIDS, "comparison": _OF_COMPARISONS}.get(kind, type(self).model_fields.keys())
        if foreign := sorted(self.model_fields_set - allowed):
            raise ValueError(f"{foreign[0]}: has no effect in a {kind}; allowed here: {', '.join(sorted(allowed))}")
        if missing := [key for key in _NEEDED[kind] if not getattr(self, key)]:
            what = "is missing; add it" if len(missing) == 1 else "are missing; add them"
            raise ValueError(f"{', '.join(missing)}: {what}")
        if self.arms and self.reference not in self.arms:
            raise ValueError(f"reference: no arm is called {not_among(self.reference, self.arms)}")
        for complaint in self._complaints():
            raise ValueError(complaint)
        return self

    def _complaints(self) -> Iterator[str]:
        select, grids = self.select, [self.grid, *(arm.grid for arm in self.arms.values())]
        if self.arms and select is None and any(grid is not None for grid in grids):
            yield "select: missing; a grid needs it to choose its values"
        if select is not None and all(grid is None for grid in grids):
            yield "select: has no effect without a grid; give one, or remove it"
        if select is not None:
            if self.cells and select.on != VALIDATION:
                yield "select.on: a study chooses values on the validation split; remove it"
            reported = {*self.seeds, *(seed for each in self.cells.values() for seed in each.seeds or ())}
            if both := sorted({*select.seeds} & reported):
                yield f"select.seeds: {both[0]} is also reported; values are chosen on seeds of their own"
        if self.tuned_at is not None and select is None:
            yield "tuned_at: has no effect without select; remove it"
        if self.tuned_at is not None and self.tuned_at not in self.cells:
            known = not_among(self.tuned_at, self.cells)
            yield f"tuned_at: no cell is called {known}; without tuned_at every cell chooses its own"
        labels = dict[str, str]()
        for name, each in self.cells.items():
            if (other := labels.setdefault(each.label, name)) != name:
                yield f"cells.{name}.label: is also that of cell {other}; give each cell a label of its own"
        seen = set[tuple[str, frozenset[str]]]()
        for cell, arm, against in self.planned:
            if cell not in self.cells:
                yield f"tests: no cell is called {not_among(cell, self.cells)}"
            for name in (arm, against):
                if name not in self.arms:
                    yield f"tests: no arm is called {not_among(name, self.arms)}"
            if arm == against:
                what = "the reference" if arm == self.reference else "what it is tested against"
                yield f"tests: {arm} is {what}; it cannot be tested against itself"
            if (test := (cell, frozenset((arm, against)))) in seen:
                yield f"tests: {arm} against {against} in {cell} is planned twice; give each test once"
            seen.add(test)

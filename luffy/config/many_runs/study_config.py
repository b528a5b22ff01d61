"""Contents of the YAML file of a study: a centre, axes around it, interactions, arms, planned tests."""

from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from luffy.config.evaluation import VALIDATION
from luffy.config.many_runs.comparison_config import ArmConfig, BudgetConfig, SelectConfig
from luffy.config.many_runs.grid import Grid
from luffy.config.strict import StrictModel

CENTRE = "centre"
"""Name of the cell in which every axis has its centre level."""
_Name = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_]*$")]
_CellName = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_-]*$")]


class LevelConfig(StrictModel):
    """One value of an axis."""

    label: str
    """Its name in tables and figures."""
    overrides: tuple[str, ...] = ()
    """`key.path=value`, for all arms; empty: the level is the experiment's own value."""
    budget: BudgetConfig | None = None
    """None: the study's."""
    sft_steps: PositiveInt | None = None
    """Steps of SFT in the arms that have SFT before RL; None: each arm's own `sft_steps`."""


class AxisConfig(StrictModel):
    """An axis of the study: a setting that is varied while the other axes stay at the centre."""

    title: str
    centre: _Name
    """The level at the centre."""
    levels: dict[_Name, LevelConfig] = Field(min_length=2)
    """The levels, in the order of figures."""

    @model_validator(mode="after")
    def _centre_exists(self) -> "AxisConfig":
        if self.centre not in self.levels:
            raise ValueError(f"centre: no level is called {self.centre!r}; there are {', '.join(self.levels)}")
        return self


class PrimaryConfig(StrictModel):
    """The measure of the planned tests."""

    suite: str
    decoding: str


class PlannedConfig(StrictModel):
    """Planned tests: each of `arms` against the reference in each of `cells`, on the primary measure."""

    cells: tuple[_CellName, ...] = Field(min_length=1)
    arms: tuple[str, ...] = Field(min_length=1)


class StudyConfig(StrictModel):
    """Contents of the YAML file of a study."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9_-]*$")
    experiment: str
    """YAML file of the experiment that all cells start from: a path relative to this folder, or a shipped name."""
    overrides: tuple[str, ...] = ()
    """`key.path=value`, for all cells; a level's overrides come after them."""
    seeds: tuple[NonNegativeInt, ...] = Field(min_length=1)
    """Reported seeds at the centre, for everything after the base. Data, base and evaluation keep the experiment's."""
    seeds_elsewhere: tuple[NonNegativeInt, ...] = Field(min_length=1)
    """Reported seeds in every other cell."""
    reference: str
    """The arm that all others are tested against."""
    budget: BudgetConfig
    workers: PositiveInt = 1
    """Number of concurrent runs. Never affects their results."""
    grid: Grid | None = None
    """Values to try for every arm that has no grid of its own."""
    select: SelectConfig | None = None
    """How each arm's values are chosen from its grid, on the validation split; None: nothing is tuned."""
    tuned_at: Literal["centre", "cell"] = "centre"
    """`centre`: values are chosen there and hold in every cell; `cell`: every cell tunes its own."""
    arms: dict[_Name, ArmConfig] = Field(min_length=2)
    axes: dict[_Name, AxisConfig] = Field(min_length=1)
    interactions: dict[_CellName, dict[str, str]] = Field(default_factory=dict)
    """Cells in which several axes leave the centre: axis to level."""
    primary: PrimaryConfig
    tests: tuple[PlannedConfig, ...] = ()
    """Holm's correction is over these alone; every other difference is exploratory."""
    limits: tuple[str, ...] = ()
    """Limitations of the results; each is a paragraph of the page."""

    @property
    def cells(self) -> dict[str, dict[str, str]]:
        """The level of each axis by cell: the centre, each axis's other levels, the interactions."""
        centre = {name: axis.centre for name, axis in self.axes.items()}
        found = {CENTRE: centre}
        for name, axis in self.axes.items():
            found |= {f"{name}-{level}": {**centre, name: level} for level in axis.levels if level != axis.centre}
        return found | {name: {**centre, **levels} for name, levels in self.interactions.items()}

    @property
    def planned(self) -> tuple[tuple[str, str], ...]:
        """Cell and arm of every planned test."""
        return tuple((cell, arm) for each in self.tests for cell in each.cells for arm in each.arms)

    @model_validator(mode="after")
    def _interactions_name_levels(self) -> "StudyConfig":
        plain = self.model_copy(update={"interactions": {}}).cells
        for name, levels in self.interactions.items():
            if name in plain:
                raise ValueError(f"interactions: {name!r} is already the name of a cell; give it another")
            for axis, level in levels.items():
                known = self.axes[axis].levels if axis in self.axes else None
                if known is None:
                    raise ValueError(f"interactions.{name}: no axis is called {axis!r}; there are {_list(self.axes)}")
                if level not in known:
                    raise ValueError(
                        f"interactions.{name}: axis {axis} has no level {level!r}; there are {_list(known)}"
                    )
        return self

    @model_validator(mode="after")
    def _tests_name_cells_and_arms(self) -> "StudyConfig":
        if self.reference not in self.arms:
            raise ValueError(f"reference: no arm is called {self.reference!r}; there are {_list(self.arms)}")
        cells, seen = self.cells, set[tuple[str, str]]()
        for cell, arm in self.planned:
            if cell not in cells:
                raise ValueError(f"tests: no cell is called {cell!r}; there are {_list(cells)}")
            if arm not in self.arms:
                raise ValueError(f"tests: no arm is called {arm!r}; there are {_list(self.arms)}")
            if arm == self.reference:
                raise ValueError(f"tests: {arm} is the reference; it cannot be tested against itself")
            if (cell, arm) in seen:
                raise ValueError(f"tests: {arm} in {cell} is planned twice; give each test once")
            seen.add((cell, arm))
        return self

    @model_validator(mode="after")
    def _tuned_on_validation(self) -> "StudyConfig":
        if self.select is not None and self.select.on != VALIDATION:
            raise ValueError("select.on: a study chooses values on the validation split; remove it")
        if self.select is None and (self.grid or any(arm.grid for arm in self.arms.values())):
            raise ValueError("select: missing; a grid needs it to choose its values")
        both = sorted(set(self.select.seeds) & {*self.seeds, *self.seeds_elsewhere}) if self.select else []
        if both:
            raise ValueError(f"select.seeds: {both[0]} is also reported; values are chosen on seeds of their own")
        return self


def _list(names: object) -> str:
    assert isinstance(names, dict)
    return ", ".join(names)

"""One experiment over a grid of values, without arms: every point with every seed (`luffy grid`).

Not to be confused with the stage `sweep`, which evaluates the checkpoints of one RL run.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import Field, JsonValue, NonNegativeInt, PositiveInt, ValidationError, model_validator

from luffy.config.experiment import ExperimentConfig
from luffy.config.load import file_kind, load_experiment, parse_overrides, read_overridden
from luffy.config.many_runs.arm_run import ArmRun, is_made_as, seeded
from luffy.config.many_runs.grid import Grid, GridPoint, grid_points
from luffy.config.shipped import experiment_file, named_file
from luffy.config.strict import StrictModel
from luffy.config.validation_errors import explain
from luffy.config.yaml_source import KeyPath
from luffy.errors import ConfigError

_SEEDED = ("sample.seed", "sft.seed", "rl.seed")


class GridConfig(StrictModel):
    """Contents of the YAML file of a grid."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9_.-]*$")
    experiment: str
    """The YAML of the experiment: a path from this file's folder, or a shipped experiment's name."""
    overrides: tuple[str, ...] = ()
    """`key.path=value`, for all points."""
    grid: Grid
    """Values by `key.path`; every combination is a point."""
    seeds: tuple[NonNegativeInt, ...] = Field(min_length=1)
    """Seeds of everything after the base, at every point. Data, base and evaluation keep the experiment's seed."""
    workers: PositiveInt = 1
    """Number of concurrent runs. Never affects their results."""

    @model_validator(mode="after")
    def _seeds_differ(self) -> "GridConfig":
        if len(set(self.seeds)) < len(self.seeds):
            raise ValueError("seeds: give each seed once")
        return self


@dataclass(frozen=True, slots=True)
class GridExperiment:
    """A loaded grid, the experiment of every point checked."""

    config: GridConfig
    points: tuple[GridPoint, ...]
    experiments: tuple[ExperimentConfig, ...]
    """One for each point, in order; their seeds are still those of the file."""

    @property
    def common(self) -> ExperimentConfig:
        """The experiment in whose name the grid is recorded; it is that of the first point."""
        return self.experiments[0].model_copy(update={"name": self.config.name})

    @property
    def runs(self) -> tuple[ArmRun, ...]:
        """Every point with every seed: seed by seed, so that an interrupted grid has whole seeds."""
        return tuple(
            ArmRun(self.config.name, seed, seeded(each, seed), point, start=("prepare_data", "base"))
            for seed in self.config.seeds
            for point, each in zip(self.points, self.experiments, strict=True)
        )


def is_grid(path: Path | str) -> bool:
    """Whether the file `path`, or the shipped one of that name, is a grid."""
    return file_kind(read_overridden(experiment_file(path))[0]) == "grid"


def load_grid(
    path: Path | str, overrides: Sequence[str] = (), over: Sequence[str] = (), seeds: Sequence[int] = ()
) -> GridExperiment:
    """The grid in the file `path`, or the shipped one of that name, with `overrides` (`key.path=value`) applied.

    `path` may also be an experiment: then `over` (`key.path=[value, value]`) is the grid, with these `seeds` (that of
    the experiment without any), and the overrides are those of the experiment. Raises ConfigError with one line for
    each mistake of the grid, or of the first point that has one.
    """
    path = experiment_file(path)
    if is_grid(path):
        if over or seeds:
            option = "--over" if over else "--seed"
            raise ConfigError(f"{option} has no effect on {path}, which is a grid; override its grid= or seeds=[...]")
        values, origins = read_overridden(path, overrides)
    else:
        values, origins = _around(path, overrides, over, seeds), dict[KeyPath, str]()
    try:
        config = GridConfig.model_validate_json(json.dumps(values))
    except ValidationError as error:
        raise ConfigError(explain(error, GridConfig, origins, default_where=str(path), values=values)) from None
    experiment = named_file(config.experiment, path, f"{origins.get(('experiment',), str(path))}: experiment")
    where = origins.get(("grid",), "command line")
    _refuse_keys(config, where)
    points = grid_points(config.grid)
    loaded = list[ExperimentConfig]()
    for point in points:
        named = f"name={config.name}.{point.number}"
        one = load_experiment(experiment, [*config.overrides, *point.overrides, named], given_at=f"{where}: grid")
        _check_point(one, point, config, where)
        made = is_made_as(one)
        same = next((points[i] for i, other in enumerate(loaded) if is_made_as(other) == made), None)
        if same is not None:
            raise ConfigError(f"{where}: grid: {point.text} and {same.text} are the same run; a key changes nothing")
        loaded.append(one)
    return GridExperiment(config, points, tuple(loaded))


def _around(path: Path, overrides: Sequence[str], over: Sequence[str], seeds: Sequence[int]) -> dict[str, JsonValue]:
    """The grid of a single experiment."""
    config = load_experiment(path, overrides)
    if not over:
        raise ConfigError(f"{path}: is no grid; say what to try: --over 'sft.num_traces=[64, 128, 256]'")
    grid = dict[str, JsonValue]()
    for given in parse_overrides(over, "--over"):
        key = ".".join(given.path)
        if not isinstance(given.value, list):
            raise ConfigError(f"--over: {key} must be a list of the values to try: --over '{key}=[1, 2]'")
        if key in grid:
            raise ConfigError(f"--over: {key} is given twice; give all of its values in one list")
        grid[key] = given.value
    return {
        "name": f"{config.name}.grid",
        "experiment": str(path.resolve()),
        "overrides": list(overrides),
        "grid": grid,
        "seeds": list(seeds) or [config.seed],
    }


def _refuse_keys(config: GridConfig, where: str) -> None:
    for key in config.grid:
        if key in ("name", "stages"):
            raise ConfigError(f"{where}: grid: {key} cannot be tried; give chain or method, or another key")
        if key in _SEEDED:
            raise ConfigError(f"{where}: grid: {key} cannot be tried: every point runs with all of seeds")


def _check_point(one: ExperimentConfig, point: GridPoint, config: GridConfig, where: str) -> None:
    if "evaluate" not in one.stages:
        raise ConfigError(f"{where}: grid: {point.text}: its chain has no stage evaluate, so there is nothing to show")
    if len(config.seeds) > 1 and not {"sft", "rl"} & set(one.stages):
        raise ConfigError(f"{where}: seeds: have no effect without the stage sft or rl; give one")

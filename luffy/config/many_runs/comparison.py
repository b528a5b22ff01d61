"""A comparison of methods: arms over one experiment, several seeds, and a budget that every arm gets.

Checked to be equal on the loaded experiments, so that the source of a difference (an arm, a preset, the experiment's
file) does not matter:

- data, base policy, evaluation and grading, so that these stages run once;
- the budget: optimizer steps after the base policy (those of SFT and of RL together), responses sampled from the
  policy in training, or tokens sampled and learned from;
- the size of an RL step: `rl.prompts_per_step`, `rl.prompts_per_update`, `rl.passes`, `rl.max_response_tokens`,
  `rl.stop`, `rl.temperature` and `objective.group.size`, rollouts and traces together.

Tokens, seconds and memory are reported as costs. The number of SFT steps between RL steps
(`objective.interleaved_sft`) is unknown in advance: they count as optimizer steps, and the page reports by how many an
arm missed the budget.

With grids, every arm is tuned first, at equally many points, with seeds and on problems that are not reported.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from luffy.config.experiment import ExperimentConfig
from luffy.config.load import file_kind, read_overridden, refuse_other_kind
from luffy.config.many_runs.arm_run import ArmRun, learns_as, seeded
from luffy.config.many_runs.comparison_arms import (
    ArmPlan,
    check_equal,
    check_grid,
    check_shared_overrides,
    load_arm,
    points_of_arms,
)
from luffy.config.many_runs.comparison_config import ComparisonConfig
from luffy.config.many_runs.grid import GridPoint
from luffy.config.many_runs.selection_split import check_selection, reported_evaluation, selecting_evaluation
from luffy.config.shipped import experiment_file, named_file
from luffy.config.validation_errors import explain
from luffy.config.yaml_source import KeyPath, Value
from luffy.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Candidate:
    """An arm with one point of its grid; its seeds are still those of the experiment."""

    arm: str
    point: GridPoint
    """Empty if nothing is tuned."""
    config: ExperimentConfig


@dataclass(frozen=True, slots=True)
class Comparison:
    """A loaded comparison; every arm has been checked at every point of its grid."""

    config: ComparisonConfig
    candidates: tuple[Candidate, ...]
    """Arm by arm, in the order of their grids."""

    @property
    def shared(self) -> ExperimentConfig:
        """The experiment of the stages that all runs share."""
        common = {
            "name": self.config.name,
            "chain": None,
            "method": None,
            "stages": ("prepare_data", "base", "evaluate"),
        }
        first = self.candidates[0].config
        return first.model_copy(update={**common, "evaluation": reported_evaluation(first, self.config.select)})

    @property
    def runs(self) -> tuple[ArmRun, ...]:
        """The runs known in advance: the tuning runs, or all runs if nothing is tuned."""
        return self.tuning_runs or self.reported_runs({each.arm: each for each in self.candidates})

    @property
    def num_runs(self) -> int:
        """Number of tuning runs and reported runs together."""
        return len(self.tuning_runs) + len(self.config.seeds) * len(self.config.arms)

    @property
    def tuning_runs(self) -> tuple[ArmRun, ...]:
        """Every point of every arm with every seed of `select`, evaluated on its data alone; none without `select`."""
        seeds = self.config.select.seeds if self.config.select is not None else ()
        return tuple(
            ArmRun(each.arm, seed, self._tried(each, seed), each.point, ("prepare_data", "base"))
            for seed in seeds
            for each in self.candidates
        )

    def reported_runs(self, chosen: Mapping[str, Candidate]) -> tuple[ArmRun, ...]:
        """Every arm in `chosen` with every reported seed, seed by seed: an interrupted one has complete seeds."""
        evaluated = {name: reported_evaluation(each.config, self.config.select) for name, each in chosen.items()}
        return tuple(
            ArmRun(name, seed, seeded(each.config.model_copy(update={"evaluation": evaluated[name]}), seed))
            for seed in self.config.seeds
            for name, each in chosen.items()
        )

    def runs_of(self, arm: str) -> tuple[ArmRun, ...]:
        """Those of `runs` that belong to one arm, seed by seed."""
        return tuple(run for run in self.runs if run.arm == arm)

    def candidates_of(self, arm: str) -> tuple[Candidate, ...]:
        """In the order of its grid."""
        return tuple(each for each in self.candidates if each.arm == arm)

    def _tried(self, candidate: Candidate, seed: int) -> ExperimentConfig:
        select, config = self.config.select, candidate.config
        assert select is not None
        own = {"name": f"{config.name}.try{candidate.point.number}", "evaluation": selecting_evaluation(config, select)}
        return seeded(config.model_copy(update=own), seed)


def is_comparison(path: Path | str) -> bool:
    """Whether the file `path`, or the shipped one of that name, is a comparison and not an experiment."""
    return file_kind(read_overridden(experiment_file(path))[0]) == "comparison"


def load_comparison(path: Path | str, overrides: Sequence[str] = ()) -> Comparison:
    """The comparison in the file `path`, or the shipped one of that name, with `overrides` (`key.path=value`) applied.

    Raises ConfigError with one line for each mistake of the comparison, or of the first arm that has one.
    """
    file = experiment_file(path)
    values, origins = read_overridden(file, overrides)
    refuse_other_kind(values, path, "comparison")
    return comparison_of_values(values, origins, file)


def comparison_of_values(values: dict[str, Value], origins: Mapping[KeyPath, str], path: Path) -> Comparison:
    """The comparison with these `values`, whose places in files are `origins`; names files as a file at `path` would.

    Raises ConfigError with one line for each mistake of the comparison, or of the first arm that has one.
    """
    try:
        config = ComparisonConfig.model_validate_json(json.dumps(values))
    except ValidationError as error:
        raise ConfigError(explain(error, ComparisonConfig, origins, default_where=str(path), values=values)) from None
    experiment = named_file(config.experiment, path, f"{_place(origins, ('experiment',), path)}: experiment")
    check_shared_overrides(config, _place(origins, ("overrides",), path))
    check_grid(config.grid, _place(origins, ("grid",), path))
    for name, arm in config.arms.items():
        check_grid(arm.grid, f"{_place(origins, ('arms', name, 'grid'), path)}: arms.{name}")
    arms = {name: ArmPlan(name, arm, _place(origins, ("arms", name), path)) for name, arm in config.arms.items()}
    comparison = Comparison(config, _candidates(config, arms, experiment))
    if config.select is not None:
        try:
            check_selection(comparison.candidates[0].config, config.select)
        except ValueError as error:
            key = str(error).partition(":")[0]
            raise ConfigError(f"{_place(origins, ('select', key), path)}: select.{error}") from None
    return comparison


def _candidates(config: ComparisonConfig, arms: Mapping[str, ArmPlan], experiment: Path) -> tuple[Candidate, ...]:
    """Every arm with each of its points; what must be equal is so for all of them."""
    points = points_of_arms(config, list(arms.values()))
    # First one of each arm, so that a mistake of an arm is found before another arm's grid is loaded.
    loaded = {name: [load_arm(arm, config, experiment, points[name][0])] for name, arm in arms.items()}
    check_equal({name: each[0] for name, each in loaded.items()}, arms)
    first = next(iter(arms))
    for name, arm in arms.items():
        for point in points[name][1:]:
            tried = load_arm(arm, config, experiment, point)
            check_equal({first: loaded[first][0], name: tried}, arms)
            _refuse_repeated(arm, tried, point, loaded[name], points[name])
            loaded[name].append(tried)
    return tuple(
        Candidate(name, point, each) for name in arms for point, each in zip(points[name], loaded[name], strict=True)
    )


def _refuse_repeated(
    arm: ArmPlan,
    tried: ExperimentConfig,
    point: GridPoint,
    before: Sequence[ExperimentConfig],
    points: Sequence[GridPoint],
) -> None:
    """Two points that are the same run would be fewer tries than the others get."""
    learns = learns_as(tried)
    same = next((other for other, each in zip(points, before, strict=False) if learns_as(each) == learns), None)
    if same is not None:
        arm.refuse(f"grid: {point.text} and {same.text} are the same run: a key of them changes nothing in this arm")


def _place(origins: Mapping[KeyPath, str], key: KeyPath, path: Path) -> str:
    return next((origins[key[:depth]] for depth in range(len(key), 0, -1) if key[:depth] in origins), str(path))

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

With grids, every arm is tuned first, at equally many points, with seeds and on problems that are not reported. With
successive halving, the points of every arm also train for equally long, rung by rung.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from luffy.config.experiment import ExperimentConfig
from luffy.config.file_kind import file_kind, refuse_other_kind
from luffy.config.load import read_overridden
from luffy.config.many_runs.arm_run import ArmRun, learns_as, seeded
from luffy.config.many_runs.comparison_arms import (
    ArmPlan,
    check_continues,
    check_equal,
    check_grid,
    check_shared_overrides,
    load_arm,
    points_of_arms,
)
from luffy.config.many_runs.comparison_config import ComparisonConfig, SelectConfig
from luffy.config.many_runs.grid import GridPoint
from luffy.config.many_runs.halving import Rung, at_rung, check_rungs, rungs_of
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
        return self.num_tuning_runs + len(self.config.seeds) * len(self.config.arms)

    @property
    def num_tuning_runs(self) -> int:
        """Number of tuning runs of all rungs."""
        tries = sum(rung.num_tries for rung in self.rungs)
        return tries * len(self.config.arms) * len(self.config.select.seeds) if self.config.select is not None else 0

    @property
    def rungs(self) -> tuple[Rung, ...]:
        """The rungs of tuning, the last with the whole budget: the only one without successive halving."""
        select, budget = self.config.select, self.config.budget.amount
        if select is None:
            return ()
        num_points = len(self.candidates_of(self.candidates[0].arm))
        return (
            (Rung(1, budget, num_points),) if select.halving is None else rungs_of(select.halving, budget, num_points)
        )

    @property
    def tuning_runs(self) -> tuple[ArmRun, ...]:
        """The runs of the first rung: every point of every arm with every seed of `select`."""
        return self.runs_at(self.rungs[0], self.candidates) if self.rungs else ()

    def runs_at(self, rung: Rung, candidates: Sequence[Candidate]) -> tuple[ArmRun, ...]:
        """Each of `candidates` with every seed of `select`, as long as `rung` says; evaluated on its data alone."""
        select = self.config.select
        assert select is not None
        number = rung.number if select.halving is not None else None
        return tuple(
            ArmRun(each.arm, seed, self._tried(each, seed, rung), each.point, ("prepare_data", "base"), number)
            for seed in select.seeds
            for each in candidates
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

    def _tried(self, candidate: Candidate, seed: int, rung: Rung) -> ExperimentConfig:
        select, config = self.config.select, candidate.config
        assert select is not None
        own = {"name": f"{config.name}.try{candidate.point.number}", "evaluation": selecting_evaluation(config, select)}
        tried = config.model_copy(update=own)
        return seeded(tried if select.halving is None else at_rung(tried, self.config.budget, rung), seed)


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
        _check_halving(comparison, config.select, arms, _place(origins, ("select", "halving"), path))
    return comparison


def _check_halving(comparison: Comparison, select: SelectConfig, arms: Mapping[str, ArmPlan], where: str) -> None:
    """Refuse rungs that decide nothing, and runs that cannot be continued from rung to rung."""
    if select.halving is None:
        return
    budget, rungs = comparison.config.budget, comparison.rungs
    try:
        check_rungs(select.halving, budget, rungs[0].num_tries if rungs else 0)
    except ValueError as error:
        raise ConfigError(f"{where}: select.halving.{error}") from None
    for each in comparison.candidates:
        check_continues(arms[each.arm], each.config, budget, rungs)


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

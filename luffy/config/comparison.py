"""A comparison of methods: arms over one experiment, several seeds, and a budget that every arm gets.

What is equal for all arms is checked on the loaded experiments, wherever a difference would come from (an arm, a
preset, the experiment's file):

- data, base policy, evaluation and grading, so that these stages run once;
- the budget: optimizer steps after the base policy (those of SFT and of RL together), or responses sampled from
  the policy in training;
- what an RL step takes: `rl.prompts_per_step`, `rl.prompts_per_update`, `rl.max_response_tokens`, `rl.temperature` and
  `objective.group.size`, rollouts and traces together.

Tokens, seconds and memory are what they turn out to be, and are reported as costs. How many SFT steps a method puts
between its RL steps (`objective.interleaved_sft`) is not known beforehand: they are counted as optimizer steps, and the
page says by how many an arm has missed the budget.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NoReturn

from pydantic import Field, NonNegativeInt, PositiveInt, ValidationError, model_validator

from luffy.config.experiment import ExperimentConfig
from luffy.config.load import chain_stages, load_experiment, read_overridden
from luffy.config.objective import DynamicSampling, ObjectiveConfig
from luffy.config.shipped import experiment_file, named_file
from luffy.config.stage_kinds import STAGE_KINDS
from luffy.config.strict import StrictModel
from luffy.config.training import RLConfig
from luffy.config.validation_errors import explain
from luffy.config.yaml_source import KeyPath
from luffy.errors import ConfigError

SHARED_NODES = ("prepare_data", "base", "evaluate_base")
"""The stages that all runs have in common."""
_BUDGETED = ("rl.steps", "sft.steps", "sft.epochs")
_SEEDED = ("seed", "sft.seed", "rl.seed")
_SHARED = ("data", "model", "base", "evaluation", "grading", "synthesize", "difficulty")
_NAMED = ("name", "chain", "method", "stages")
_REASONS = {
    "budget": "it would be another budget; set that of the comparison",
    "seeds": "the comparison's seeds say it",
    "shared": "all arms share it, so that their stages run once; override it for all of them",
    "named": "the arm's chain and method, and the comparison's name, say it",
}
_ANY_LENGTH = 10**6
_ArmName = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_-]*$")]


class BudgetConfig(StrictModel):
    """How much every arm learns: exactly one of the two."""

    optimizer_steps: PositiveInt | None = None
    """Optimizer steps after the base policy, those of SFT and of RL together."""
    rollouts: PositiveInt | None = None
    """Responses sampled during RL; steps of SFT are given by `sft_steps` and not counted."""

    @model_validator(mode="after")
    def _one_kind(self) -> "BudgetConfig":
        if (self.optimizer_steps is None) == (self.rollouts is None):
            raise ValueError("give exactly one of optimizer_steps and rollouts")
        return self

    @property
    def text(self) -> str:
        """In words."""
        if self.optimizer_steps is not None:
            return f"{self.optimizer_steps} optimizer steps"
        return f"{self.rollouts} rollouts"


class ArmConfig(StrictModel):
    """One way to learn."""

    chain: str
    """A preset of `exp_configs/chains/`."""
    method: str
    """A preset of `exp_configs/methods/`; of a chain with RL, that of RL."""
    sft_steps: PositiveInt | None = None
    """Optimizer steps of SFT where RL follows; None: the chain has no SFT before RL."""
    overrides: tuple[str, ...] = ()
    """`key.path=value`, for this arm alone."""


class ComparisonConfig(StrictModel):
    """What one YAML file of a comparison says."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9_.-]*$")
    experiment: str
    """The YAML of what all arms share: a path from this file's folder, or a shipped experiment's name."""
    overrides: tuple[str, ...] = ()
    """`key.path=value`, for all arms."""
    seeds: tuple[NonNegativeInt, ...] = Field(min_length=1)
    """For SFT and RL: order of prompts, choice of traces, rollouts. Data, base and evaluation keep the experiment's."""
    reference: str
    """The arm that all others are tested against."""
    budget: BudgetConfig
    workers: PositiveInt = 1
    """Runs at the same time; what they come to does not depend on it, how long they take does."""
    arms: dict[_ArmName, ArmConfig] = Field(min_length=2)

    @model_validator(mode="after")
    def _names_are_right(self) -> "ComparisonConfig":
        if self.reference not in self.arms:
            raise ValueError(f"reference: no arm is called {self.reference!r}; there are {', '.join(self.arms)}")
        if len(set(self.seeds)) < len(self.seeds):
            raise ValueError("seeds: give each seed once")
        return self


@dataclass(frozen=True, slots=True)
class ArmRun:
    """One arm with one seed."""

    arm: str
    seed: int
    config: ExperimentConfig

    @property
    def title(self) -> str:
        return f"{self.arm} {self.seed}"

    @property
    def nodes(self) -> tuple[str, ...]:
        """The stages that the comparison needs of it, in order: no report, and no evaluation on the way."""
        trained = [
            stage
            for stage in self.config.stages
            if stage not in SHARED_NODES and {"policy", "prompts"} & {*STAGE_KINDS[stage].provides}
        ]
        return (*SHARED_NODES, *trained, f"evaluate_{self.last}")

    @property
    def last(self) -> str:
        """The stage whose policy is the arm's result."""
        return [stage for stage in self.config.stages if "policy" in STAGE_KINDS[stage].provides][-1]


@dataclass(frozen=True, slots=True)
class Comparison:
    """A loaded comparison, every arm of it checked."""

    config: ComparisonConfig
    runs: tuple[ArmRun, ...]
    """Seed by seed, so that an interrupted comparison has whole seeds."""

    @property
    def shared(self) -> ExperimentConfig:
        """The experiment of what all runs have in common."""
        common = {
            "name": self.config.name,
            "chain": None,
            "method": None,
            "stages": ("prepare_data", "base", "evaluate"),
        }
        return self.runs[0].config.model_copy(update=common)

    def runs_of(self, arm: str) -> tuple[ArmRun, ...]:
        """Those of one arm, seed by seed."""
        return tuple(run for run in self.runs if run.arm == arm)


def is_comparison(path: Path | str) -> bool:
    """Whether the file `path`, or the shipped one of that name, is a comparison and not an experiment."""
    return "arms" in read_overridden(experiment_file(path))[0]


def load_comparison(path: Path | str, overrides: Sequence[str] = ()) -> Comparison:
    """The comparison in the file `path`, or the shipped one of that name, with `overrides` (`key.path=value`) applied.

    Raises ConfigError with one line for each mistake of the comparison, or of the first arm that has one.
    """
    path = experiment_file(path)
    values, origins = read_overridden(path, overrides)
    if values.keys().isdisjoint(("arms", "experiment")):
        raise ConfigError(f"{path}: is no comparison: it has no arms; an experiment is run by: luffy run {path}")
    try:
        config = ComparisonConfig.model_validate_json(json.dumps(values))
    except ValidationError as error:
        raise ConfigError(explain(error, ComparisonConfig, origins, default_where=str(path), values=values)) from None
    experiment = named_file(config.experiment, path, f"{_place(origins, ('experiment',), path)}: experiment")
    _refuse_fixed(config.overrides, (*_BUDGETED, *_SEEDED[1:], *_NAMED), _place(origins, ("overrides",), path))
    arms = {name: _ArmPlan(name, arm, _place(origins, ("arms", name), path)) for name, arm in config.arms.items()}
    loaded = {name: _load(arm, config, experiment) for name, arm in arms.items()}
    _check_equal(loaded, arms)
    runs = tuple(ArmRun(name, seed, _seeded(loaded[name], seed)) for seed in config.seeds for name in arms)
    return Comparison(config, runs)


@dataclass(frozen=True, slots=True)
class _ArmPlan:
    name: str
    config: ArmConfig
    where: str
    """File and line."""

    def refuse(self, text: str) -> NoReturn:
        raise ConfigError(f"{self.where}: arms.{self.name}: {text}")


def _place(origins: Mapping[KeyPath, str], key: KeyPath, path: Path) -> str:
    return origins.get(key, str(path))


def _load(arm: _ArmPlan, comparison: ComparisonConfig, experiment: Path) -> ExperimentConfig:
    """The experiment of an arm, as long as the budget says; its seeds are still those of the file."""
    where = f"{arm.where}: arms.{arm.name}"
    _refuse_fixed(arm.config.overrides, (*_BUDGETED, *_SEEDED, *_SHARED, *_NAMED), where)
    stages = chain_stages(arm.config.chain, experiment)
    named = [f"name={comparison.name}.{arm.name}", f"chain={arm.config.chain}", f"method={arm.config.method}"]
    overrides = [*comparison.overrides, *arm.config.overrides, *named]
    # How many steps an arm's share of the budget makes depends on the rest of its experiment.
    unmeasured = load_experiment(experiment, [*overrides, *_lengths(stages, 1, _ANY_LENGTH)], given_at=where)
    lengths = _lengths(stages, *_shares(arm, comparison.budget, unmeasured))
    return load_experiment(experiment, [*overrides, *lengths], given_at=where)


def _lengths(stages: Sequence[str], sft_steps: int, rl_steps: int) -> list[str]:
    sft = ["sft.epochs=null", f"sft.steps={sft_steps}"] if "sft" in stages else []
    return [*sft, f"rl.steps={rl_steps}"] if "rl" in stages else sft


def _shares(arm: _ArmPlan, budget: BudgetConfig, config: ExperimentConfig) -> tuple[int, int]:
    """Optimizer steps of SFT and RL steps; 0 for what the chain does not have."""
    has_sft, has_rl = ("sft" in config.stages, "rl" in config.stages)
    if "sample" in config.stages:
        arm.refuse(
            f"chain {arm.config.chain} has the stage sample, whose responses no budget counts; run it as an experiment "
            "of its own"
        )
    if not has_sft and not has_rl:
        arm.refuse(f"chain {arm.config.chain} trains nothing: there is nothing to compare")
    if has_sft and has_rl and arm.config.sft_steps is None:
        arm.refuse("sft_steps: missing; say how many optimizer steps SFT makes before RL")
    if not (has_sft and has_rl) and arm.config.sft_steps is not None:
        arm.refuse(f"sft_steps has no effect with chain {arm.config.chain}, which has not both SFT and RL; remove it")
    sft_steps = arm.config.sft_steps or 0
    if budget.rollouts is not None:
        return sft_steps, _steps_of_rollouts(arm, budget.rollouts, config)
    assert budget.optimizer_steps is not None
    if not has_rl:
        return budget.optimizer_steps, 0
    assert config.rl is not None
    left, a_step = budget.optimizer_steps - sft_steps, config.rl.updates_per_step
    if left < 1 or left % a_step:
        arm.refuse(
            f"budget.optimizer_steps {budget.optimizer_steps} leaves {left} to RL, which is no positive multiple of "
            f"the {a_step} that each RL step makes (rl.prompts_per_step / rl.prompts_per_update); change one of them"
        )
    return sft_steps, left // a_step


def _steps_of_rollouts(arm: _ArmPlan, rollouts: int, config: ExperimentConfig) -> int:
    """RL steps that draw as many responses, where every prompt has as many traces as the group takes."""
    if config.rl is None or config.objective is None or "rl" not in config.stages:
        arm.refuse("samples no rollouts, so a budget of rollouts does not bound it; give budget.optimizer_steps")
    group = config.objective.group
    varies = (
        group.prefix is not None or isinstance(group.filter, DynamicSampling) or config.objective.replay is not None
    )
    if varies:
        arm.refuse(
            f"how many rollouts {config.method} samples in a step depends on their rewards (prefixes, dynamic "
            "sampling or replay); give budget.optimizer_steps"
        )
    traces = group.off_policy if group.off_policy_when_accuracy_at_most is None else 0
    a_step = config.rl.prompts_per_step * (group.size - traces)
    if rollouts % a_step:
        arm.refuse(
            f"samples {a_step} rollouts a step ({config.rl.prompts_per_step} prompts x {group.size - traces}), of "
            f"which budget.rollouts {rollouts} is no multiple"
        )
    return rollouts // a_step


def _refuse_fixed(overrides: Sequence[str], fixed: Sequence[str], where: str) -> None:
    """What belongs to the comparison cannot be an arm's own, in whole or in part."""
    for text in overrides:
        key = text.partition("=")[0]
        hit = next((name for name in fixed if f"{key}.".startswith(f"{name}.") or f"{name}.".startswith(f"{key}.")), "")
        if hit and key not in ("sft", "rl"):
            raise ConfigError(f"{where}: overrides: {key} is not to be overridden here: {_REASONS[_kind_of(hit)]}")
        if hit:
            raise ConfigError(f"{where}: overrides: give the fields of {key} one by one (e.g. {key}.optimizer.lr=1e-4)")


def _kind_of(name: str) -> str:
    kinds = {"budget": _BUDGETED, "seeds": _SEEDED, "shared": _SHARED, "named": _NAMED}
    return next(kind for kind, names in kinds.items() if name in names)


def _check_equal(loaded: Mapping[str, ExperimentConfig], arms: Mapping[str, _ArmPlan]) -> None:
    """Refuse arms that differ in what must be equal, wherever the difference comes from."""
    first = next(iter(loaded))
    for field, value_of in _EQUAL.items():
        values = {name: value_of(config) for name, config in loaded.items()}
        _refuse_difference(field, {name: value for name, value in values.items() if value is not None}, arms)
    for section in ("seed", "cluster", *_SHARED[:-1]):
        other = next((name for name in loaded if getattr(loaded[name], section) != getattr(loaded[first], section)), "")
        if other:
            arms[other].refuse(f"{section} is not that of arm {first}; what all arms share cannot differ")


def _refuse_difference(field: str, values: Mapping[str, object], arms: Mapping[str, _ArmPlan]) -> None:
    if not values:
        return
    first, expected = next(iter(values.items()))
    for name, value in values.items():
        if value != expected:
            arms[name].refuse(f"{field} is {value}, and that of arm {first} {expected}: an RL step must take the same")


def _of_rl(get: Callable[[RLConfig], object]) -> Callable[[ExperimentConfig], object]:
    return lambda config: get(config.rl) if config.rl is not None and "rl" in config.stages else None


def _of_objective(get: Callable[[ObjectiveConfig], object]) -> Callable[[ExperimentConfig], object]:
    return lambda config: get(config.objective) if config.objective is not None and "rl" in config.stages else None


_EQUAL: Mapping[str, Callable[[ExperimentConfig], object]] = {
    "rl.prompts_per_step": _of_rl(lambda rl: rl.prompts_per_step),
    "rl.prompts_per_update": _of_rl(lambda rl: rl.prompts_per_update or rl.prompts_per_step),
    "rl.max_response_tokens": _of_rl(lambda rl: rl.max_response_tokens),
    "rl.temperature": _of_rl(lambda rl: rl.temperature),
    "objective.group.size": _of_objective(lambda objective: objective.group.size),
}
"""What an RL step takes; None for an arm without RL."""


def _seeded(config: ExperimentConfig, seed: int) -> ExperimentConfig:
    sections = {"sft": config.sft, "rl": config.rl}
    own = {name: section.model_copy(update={"seed": seed}) for name, section in sections.items() if section is not None}
    return config.model_copy(update={"name": f"{config.name}.{seed}", **own})

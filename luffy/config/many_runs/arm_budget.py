"""The experiment of each arm, sized to the budget, and the checks that arms are comparable."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from luffy.config.experiment import ExperimentConfig
from luffy.config.group import DynamicSampling
from luffy.config.load import chain_stages, load_experiment
from luffy.config.many_runs.sweep_design import (
    ArmConfig,
    BudgetConfig,
    Grid,
    GridPoint,
    SweepDesign,
    draw_points,
    grid_points,
)
from luffy.config.objective import ObjectiveConfig
from luffy.config.training import RLConfig
from luffy.errors import ConfigError

_BUDGETED = ("rl.steps", "rl.max_tokens", "sft.steps", "sft.epochs", "sft.max_tokens")
_SEEDED = ("seed", "sample.seed", "sft.seed", "rl.seed")
_SHARED = ("data", "model", "base", "evaluation", "grading", "synthesize", "difficulty")
_NAMED = ("name", "chain", "method", "stages")
_REASONS = {
    **dict.fromkeys(_BUDGETED, "it would change the budget; set the budget of the comparison"),
    **dict.fromkeys(_SEEDED, "the comparison's seeds decide it"),
    **dict.fromkeys(_SHARED, "all arms share it, so that their stages run once; override it for all of them"),
    **dict.fromkeys(_NAMED, "the arm's chain and method, and the comparison's name, decide it"),
}
_ANY_LENGTH = 10**6


@dataclass(frozen=True, slots=True)
class ArmPlan:
    """An arm as given in YAML."""

    name: str
    config: ArmConfig
    where: str
    """File and line."""

    def refuse(self, text: str) -> NoReturn:
        """Raise ConfigError, one line that begins with the arm."""
        raise ConfigError(f"{self.where}: arms.{self.name}: {text}")


def check_shared_overrides(design: SweepDesign, where: str) -> None:
    """Raise ConfigError for an override of all arms that the comparison itself decides."""
    _refuse_fixed(design.overrides, (*_BUDGETED, *_SEEDED[1:], *_NAMED), where, "overrides")


def check_grid(grid: Grid | None, where: str) -> None:
    """Raise ConfigError for a key that the comparison decides, or that all arms share."""
    _refuse_fixed(tuple(grid or ()), (*_BUDGETED, *_SEEDED, *_SHARED, *_NAMED, *_EQUAL), where, "grid")


def points_of_arms(design: SweepDesign, arms: Sequence[ArmPlan]) -> dict[str, tuple[GridPoint, ...]]:
    """The points that each arm tries, equally many; ConfigError where that cannot be."""
    select = design.select
    points = {arm.name: grid_points(arm.config.grid or design.grid) for arm in arms}
    if select is not None and select.random is not None:
        for arm in arms:
            if len(points[arm.name]) < select.random:
                arm.refuse(f"grid: has {len(points[arm.name])} of the {select.random} points of select.random")
        # Not by the experiment's seed, which is that of the data.
        return {name: draw_points(each, select.random, select.seeds[0]) for name, each in points.items()}
    first = arms[0]
    for arm in arms:
        if len(points[arm.name]) != len(points[first.name]):
            arm.refuse(
                f"grid: has {len(points[arm.name])} points, and that of arm {first.name} {len(points[first.name])}: "
                "every arm needs the same number of points; change one of them, or set select.random"
            )
    return points


def load_arm(arm: ArmPlan, design: SweepDesign, experiment: Path, point: GridPoint) -> ExperimentConfig:
    """An arm's experiment at `point`, sized to the budget; its seeds are still those of the file."""
    where = f"{arm.where}: arms.{arm.name}"
    _refuse_fixed(arm.config.overrides, (*_BUDGETED, *_SEEDED, *_SHARED, *_NAMED), where, "overrides")
    stages = chain_stages(arm.config.chain, experiment, where)
    named = [f"name={design.name}.{arm.name}", f"chain={arm.config.chain}", f"method={arm.config.method}"]
    overrides = [*design.overrides, *arm.config.overrides, *point.overrides, *named]
    # How many steps an arm's share of the budget makes depends on the rest of its experiment.
    unmeasured = load_experiment(experiment, [*overrides, *_lengths(stages, _ANY_LENGTH, _ANY_LENGTH)], given_at=where)
    if not {"sft", "rl"} & {*unmeasured.stages}:
        arm.refuse(f"chain {arm.config.chain} trains nothing: there is nothing to compare")
    budget = design.budget
    assert budget is not None
    lengths = (
        _lengths_by_tokens(arm, budget, unmeasured) if budget.tokens else _lengths_by_steps(arm, budget, unmeasured)
    )
    return load_experiment(experiment, [*overrides, *lengths], given_at=where)


def _lengths(stages: Sequence[str], sft_steps: int, rl_steps: int) -> list[str]:
    sft = ["sft.epochs=null", f"sft.steps={sft_steps}"] if "sft" in stages else []
    return [*sft, f"rl.steps={rl_steps}"] if "rl" in stages else sft


def _check_share(arm: ArmPlan, config: ExperimentConfig, name: str, share: int | None) -> None:
    """Refuse a missing share of SFT before RL, and one of a chain that has not both."""
    has_both = {"sft", "rl"} <= {*config.stages}
    if has_both and share is None:
        unit = "optimizer steps SFT makes" if name == "sft_steps" else "tokens SFT learns from"
        arm.refuse(f"{name}: missing; say how many {unit} before RL")
    if not has_both and share is not None:
        arm.refuse(f"{name} has no effect with chain {arm.config.chain}, which has not both SFT and RL; remove it")


def _lengths_by_tokens(arm: ArmPlan, budget: BudgetConfig, config: ExperimentConfig) -> list[str]:
    """Every stage ends by its share of the tokens, or by the highest number of steps."""
    assert budget.tokens is not None
    assert budget.max_optimizer_steps is not None
    _refuse_sampling(arm, config, "tokens")
    if arm.config.sft_steps is not None:
        arm.refuse("sft_steps: budget.tokens counts tokens; give sft_tokens")
    sft_tokens = arm.config.sft_tokens
    _check_share(arm, config, "sft_tokens", sft_tokens)
    if sft_tokens is not None and sft_tokens >= budget.tokens:
        arm.refuse(f"sft_tokens {sft_tokens} leaves none of budget.tokens {budget.tokens} to RL; lower it")
    if plan := _planned_by_steps(config):
        arm.refuse(f"{plan} depends on the number of steps, which is not fixed under budget.tokens; keep it constant")
    a_step = config.rl.updates_per_step if config.rl is not None and "rl" in config.stages else 1
    if budget.max_optimizer_steps < a_step:
        arm.refuse(
            f"budget.max_optimizer_steps {budget.max_optimizer_steps} is less than the {a_step} that an RL step makes; "
            "raise it"
        )
    lengths = _lengths(config.stages, budget.max_optimizer_steps, budget.max_optimizer_steps // a_step)
    if "sft" in config.stages:
        lengths.append(f"sft.max_tokens={sft_tokens or budget.tokens}")
    if "rl" in config.stages:
        lengths.append(f"rl.max_tokens={budget.tokens - (sft_tokens or 0)}")
    return lengths


def _planned_by_steps(config: ExperimentConfig) -> str:
    """The section of the settings of training that depends on the number of its steps; empty where none does."""
    sft = config.sft if "sft" in config.stages else None
    if sft is not None and sft.optimizer.schedule.depends_on_length:
        return "sft.optimizer.schedule"
    if sft is not None and sft.objective.depends_on_length:
        return "sft.objective"
    if config.rl is None or "rl" not in config.stages:
        return ""
    assert config.objective is not None
    critic = config.rl.critic
    plans = {
        "rl.optimizer.schedule": config.rl.optimizer.schedule.depends_on_length,
        "rl.critic.optimizer.schedule": critic is not None and critic.optimizer.schedule.depends_on_length,
        "rl.sampling": config.rl.sampling.depends_on_length,
        "objective": config.objective.depends_on_length,
    }
    return next((name for name, depends in plans.items() if depends), "")


def _lengths_by_steps(arm: ArmPlan, budget: BudgetConfig, config: ExperimentConfig) -> list[str]:
    """Overrides that set the number of optimizer steps, or of RL steps that sample the budget's rollouts."""
    if arm.config.sft_tokens is not None:
        arm.refuse("sft_tokens has no effect without budget.tokens; give sft_steps")
    _check_share(arm, config, "sft_steps", arm.config.sft_steps)
    sft_steps = arm.config.sft_steps or 0
    if budget.rollouts is not None:
        _refuse_sampling(arm, config, "rollouts")
        return _lengths(config.stages, sft_steps, _steps_of_rollouts(arm, budget.rollouts, config))
    assert budget.optimizer_steps is not None
    if "rl" not in config.stages:
        return _lengths(config.stages, _steps_of_a_round(arm, budget.optimizer_steps, config), 0)
    assert config.rl is not None
    left, a_step = budget.optimizer_steps - sft_steps, config.rl.updates_per_step
    if left < 1 or left % a_step:
        arm.refuse(
            f"budget.optimizer_steps {budget.optimizer_steps} leaves {left} to RL, which is not a positive multiple of "
            f"the {a_step} that each RL step makes (rl.passes x rl.prompts_per_step / rl.prompts_per_update); change "
            "one of them"
        )
    return _lengths(config.stages, _steps_of_a_round(arm, sft_steps, config), left // a_step)


def _refuse_sampling(arm: ArmPlan, config: ExperimentConfig, unit: str) -> None:
    """The stage `sample` answers every training prompt, and only the data and the policy say how much that is."""
    if "sample" in config.stages:
        arm.refuse(
            f"how many {unit} the stage sample of chain {arm.config.chain} takes is known only afterwards; give "
            "budget.optimizer_steps, beside which they are reported"
        )


def _steps_of_a_round(arm: ArmPlan, steps: int, config: ExperimentConfig) -> int:
    """Steps of each SFT, of which a chain with `sample` has one in every round."""
    rounds = config.expert_iteration.rounds if "sample" in config.stages else 1
    if steps % rounds:
        arm.refuse(
            f"{steps} optimizer steps of SFT are no multiple of its {rounds} rounds (expert_iteration.rounds); change "
            "one of them"
        )
    return steps // rounds


def _steps_of_rollouts(arm: ArmPlan, rollouts: int, config: ExperimentConfig) -> int:
    """RL steps that draw as many responses, where every prompt has as many traces as the group takes."""
    if config.rl is None or config.objective is None or "rl" not in config.stages:
        arm.refuse("samples no rollouts, so a budget of rollouts does not bound it; give budget.optimizer_steps")
    group = config.objective.group
    varies = (
        group.prefix is not None
        or group.guidance is not None
        or group.hint is not None
        or group.anchor is not None
        or isinstance(group.filter, DynamicSampling)
        or config.objective.replay is not None
    )
    if varies:
        arm.refuse(
            f"how many rollouts {config.method} samples in a step depends on their rewards (prefixes, "
            "guidance, hints, anchors, dynamic sampling or replay); give budget.optimizer_steps"
        )
    traces = group.off_policy if group.off_policy_when_accuracy_at_most is None else 0
    a_step = config.rl.prompts_per_step * (group.size - traces)
    if rollouts % a_step:
        arm.refuse(
            f"samples {a_step} rollouts a step ({config.rl.prompts_per_step} prompts x {group.size - traces}), "
            f"and budget.rollouts {rollouts} is not a multiple of that"
        )
    return rollouts // a_step


def _refuse_fixed(overrides: Sequence[str], fixed: Sequence[str], where: str, what: str) -> None:
    """What belongs to the comparison cannot be an arm's own, in whole or in part."""
    for key in (text.partition("=")[0] for text in overrides):
        hit = next((name for name in fixed if f"{key}.".startswith(f"{name}.") or f"{name}.".startswith(f"{key}.")), "")
        if hit and key not in ("sample", "sft", "rl"):
            reason = _REASONS.get(hit, "it must be the same in all arms; override it for all of them")
            raise ConfigError(f"{where}: {what}: {key} cannot be overridden here: {reason}")
        if hit:
            raise ConfigError(f"{where}: {what}: give the fields of {key} one by one ({key}.FIELD=VALUE)")


def check_equal(loaded: Mapping[str, ExperimentConfig], arms: Mapping[str, ArmPlan]) -> None:
    """Refuse arms that differ in what must be equal, wherever the difference comes from."""
    for field, value_of in _EQUAL.items():
        values = {
            name: value_of(config.rl, config.objective)
            for name, config in loaded.items()
            if "rl" in config.stages and config.rl is not None and config.objective is not None
        }
        other = next((name for name, value in values.items() if value != next(iter(values.values()))), None)
        if other is not None:
            first, expected = next(iter(values.items()))
            arms[other].refuse(
                f"{field} is {values[other]}, and that of arm {first} {expected}: an RL step must take the same"
            )
    first = next(iter(loaded))
    for section in ("seed", "cluster", *_SHARED[:-1]):
        other = next(
            (name for name in loaded if getattr(loaded[name], section) != getattr(loaded[first], section)), None
        )
        if other is not None:
            arms[other].refuse(f"{section} is not that of arm {first}; what all arms share cannot differ")


_EQUAL: Mapping[str, Callable[[RLConfig, ObjectiveConfig], object]] = {
    "rl.prompts_per_step": lambda rl, _: rl.prompts_per_step,
    "rl.prompts_per_update": lambda rl, _: rl.prompts_per_update or rl.prompts_per_step,
    "rl.passes": lambda rl, _: rl.passes,
    "rl.max_response_tokens": lambda rl, _: rl.max_response_tokens,
    "rl.stop": lambda rl, _: rl.stop,
    "rl.temperature": lambda rl, _: rl.temperature,
    "objective.group.size": lambda _, objective: objective.group.size,
}
"""What an RL step takes."""

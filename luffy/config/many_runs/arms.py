"""Every arm of a comparison at every point of its grid, sized to the budget; and that arms are comparable."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import NoReturn

from luffy.config.evaluation import VALIDATION
from luffy.config.experiment import ExperimentConfig, StageVisit, visits_of
from luffy.config.group import DynamicSampling
from luffy.config.load import chain_stages, load_experiment
from luffy.config.many_runs.sweep_design import (
    ArmConfig,
    BudgetConfig,
    GridPoint,
    SelectConfig,
    SweepDesign,
    draw_points,
    grid_points,
)
from luffy.config.settings import CONFIGURE
from luffy.config.shipped import named_file
from luffy.config.stage_kinds import STAGE_KINDS
from luffy.config.strict import OF_ONE_MACHINE, StrictModel
from luffy.config.yaml_source import KeyPath, place_of
from luffy.errors import ConfigError

SHARED_NODES = ("prepare_data", "base", "evaluate_base")
"""The stages that all runs of a comparison have in common."""
SEEDED = ("sample.seed", "sft.seed", "rl.seed")
_BUDGETED = ("rl.steps", "rl.max_tokens", "sft.steps", "sft.epochs", "sft.max_tokens")
_SHARED = ("data", "model", "base", "evaluation", "grading", "synthesize", "difficulty")
_NAMED = ("name", "chain", "method", "stages")
_REASONS = {
    **dict.fromkeys(_BUDGETED, "it would change the budget; set the budget of the comparison"),
    **dict.fromkeys(("seed", *SEEDED), "the comparison's seeds decide it"),
    **dict.fromkeys(_SHARED, "all arms share it, so that their stages run once; override it for all of them"),
    **dict.fromkeys(_NAMED, "the arm's chain and method, and the comparison's name, decide it"),
}
_EQUAL = (
    "rl.prompts_per_step",
    "rl.prompts_per_update",
    "rl.passes",
    "rl.max_response_tokens",
    "rl.stop",
    "rl.temperature",
    "objective.group.size",
)
"""What an RL step takes."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """An arm with one point of its grid; its seeds are still those of the experiment."""

    arm: str
    point: GridPoint
    config: ExperimentConfig


@dataclass(frozen=True, slots=True)
class _ArmPlan:
    """An arm as given in YAML."""

    name: str
    config: ArmConfig
    where: str

    def refuse(self, text: str) -> NoReturn:
        raise ConfigError(f"{self.where}: {text}")


def candidates_of_arms(design: SweepDesign, path: Path, origins: Mapping[KeyPath, str]) -> tuple[Candidate, ...]:
    """Every arm of one comparison with each of its points; what must be equal is so for all of them."""

    def place(*key: str) -> str:
        return place_of(key, origins, str(path))

    experiment = named_file(design.experiment, path, f"{place('experiment')}: experiment")
    decided = (*_BUDGETED, *SEEDED, *_NAMED)
    _refuse_fixed(design.overrides, decided, place("overrides"), "overrides")
    in_grids = (*decided, "seed", *_SHARED, *_EQUAL)
    _refuse_fixed(design.grid or (), in_grids, place("grid"), "grid")
    for name, arm in design.arms.items():
        _refuse_fixed(arm.grid or (), in_grids, f"{place('arms', name, 'grid')}: arms.{name}", "grid")
    plans = {name: _ArmPlan(name, arm, f"{place('arms', name)}: arms.{name}") for name, arm in design.arms.items()}
    points = _points_of_arms(design, list(plans.values()))
    # First one of each arm, so that a mistake of an arm is found before another arm's grid is loaded.
    loaded = {name: [_load_arm(plan, design, experiment, points[name][0])] for name, plan in plans.items()}
    _check_equal({name: each[0] for name, each in loaded.items()}, plans)
    first = next(iter(plans))
    for name, plan in plans.items():
        for point in points[name][1:]:
            tried = _load_arm(plan, design, experiment, point)
            _check_equal({first: loaded[first][0], name: tried}, plans)
            learned = [_settings(each, [visit.stage for visit in learning(each)]) for each in (*loaded[name], tried)]
            if learned[-1] in learned[:-1]:  # fewer tries than the others get
                same = points[name][learned.index(learned[-1])]
                plan.refuse(
                    f"grid: {point.text} and {same.text} are the same run: a key of them changes nothing in this arm"
                )
            loaded[name].append(tried)
    if design.select is not None:
        for key, complaint in _complaints_about_selection(loaded[first][0], design.select):
            raise ConfigError(f"{place('select', key)}: select.{key}: {complaint}")
    return tuple(
        Candidate(name, point, each) for name in plans for point, each in zip(points[name], loaded[name], strict=True)
    )


def _refuse_fixed(overrides: Iterable[str], fixed: Sequence[str], where: str, what: str) -> None:
    """What belongs to the comparison cannot be an arm's own, in whole or in part."""
    for key in (text.partition("=")[0] for text in overrides):
        hit = next((name for name in fixed if f"{key}.".startswith(f"{name}.") or f"{name}.".startswith(f"{key}.")), "")
        if hit and key not in ("sample", "sft", "rl"):
            reason = _REASONS.get(hit, "it must be the same in all arms; override it for all of them")
            raise ConfigError(f"{where}: {what}: {key} cannot be overridden here: {reason}")
        if hit:
            raise ConfigError(f"{where}: {what}: give the fields of {key} one by one ({key}.FIELD=VALUE)")


def _points_of_arms(design: SweepDesign, arms: Sequence[_ArmPlan]) -> dict[str, tuple[GridPoint, ...]]:
    """The points that each arm tries, equally many; ConfigError where that cannot be."""
    select, first = design.select, arms[0].name
    points = {arm.name: grid_points(arm.config.grid or design.grid) for arm in arms}
    for arm, number in ((arm, len(points[arm.name])) for arm in arms):
        if select is not None and select.random is not None:
            if number < select.random:
                arm.refuse(f"grid: has {number} of the {select.random} points of select.random")
            # Not by the experiment's seed, which is that of the data.
            points[arm.name] = draw_points(points[arm.name], select.random, select.seeds[0])
        elif number != len(points[first]):
            arm.refuse(
                f"grid: has {number} points, and that of arm {first} {len(points[first])}: "
                "every arm needs the same number of points; change one of them, or set select.random"
            )
    return points


def _load_arm(arm: _ArmPlan, design: SweepDesign, experiment: Path, point: GridPoint) -> ExperimentConfig:
    """An arm's experiment at `point`, sized to the budget; its seeds are still those of the file."""
    own, budget = arm.config, design.budget
    assert budget is not None
    _refuse_fixed(own.overrides, (*_BUDGETED, "seed", *SEEDED, *_SHARED, *_NAMED), arm.where, "overrides")
    named = [f"name={design.name}.{arm.name}", f"chain={own.chain}", f"method={own.method}"]
    overrides = [*design.overrides, *own.overrides, *point.overrides, *named]
    # How many steps an arm's share of the budget makes depends on the rest of its experiment.
    any_length = _lengths(chain_stages(own.chain, experiment, arm.where), 10**6, 10**6)
    unmeasured = load_experiment(experiment, [*overrides, *any_length], given_at=arm.where)
    if not {"sft", "rl"} & {*unmeasured.stages}:
        arm.refuse(f"chain {own.chain} trains nothing: there is nothing to compare")
    lengths = (_lengths_by_tokens if budget.tokens else _lengths_by_steps)(arm, budget, unmeasured)
    return load_experiment(experiment, [*overrides, *lengths], given_at=arm.where)


def _lengths(stages: Sequence[str], sft_steps: int, rl_steps: int) -> list[str]:
    sft = ["sft.epochs=null", f"sft.steps={sft_steps}"] if "sft" in stages else []
    return [*sft, f"rl.steps={rl_steps}"] if "rl" in stages else sft


def _check_share(arm: _ArmPlan, config: ExperimentConfig, name: str, share: int | None) -> None:
    """Refuse a missing share of SFT before RL, and one of a chain that has not both."""
    has_both = {"sft", "rl"} <= {*config.stages}
    if has_both and share is None:
        unit = "optimizer steps SFT makes" if name == "sft_steps" else "tokens SFT learns from"
        arm.refuse(f"{name}: missing; say how many {unit} before RL")
    if not has_both and share is not None:
        arm.refuse(f"{name} has no effect with chain {arm.config.chain}, which has not both SFT and RL; remove it")


def _refuse_sampling(arm: _ArmPlan, config: ExperimentConfig, unit: str) -> None:
    """The stage `sample` answers every training prompt, and only the data and the policy say how much that is."""
    if "sample" in config.stages:
        arm.refuse(
            f"how many {unit} the stage sample of chain {arm.config.chain} takes is known only afterwards; give "
            "budget.optimizer_steps, beside which they are reported"
        )


def _lengths_by_tokens(arm: _ArmPlan, budget: BudgetConfig, config: ExperimentConfig) -> list[str]:
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
    sft = config.sft if "sft" in config.stages else None
    rl = config.rl if "rl" in config.stages else None
    planned = {
        "sft.optimizer.schedule": sft and sft.optimizer.schedule,
        "sft.objective": sft and sft.objective,
        "rl.optimizer.schedule": rl and rl.optimizer.schedule,
        "rl.critic.optimizer.schedule": rl and rl.critic and rl.critic.optimizer.schedule,
        "rl.sampling": rl and rl.sampling,
        "objective": rl and config.objective,
    }
    if plan := next((name for name, part in planned.items() if part and part.depends_on_length), None):
        arm.refuse(f"{plan} depends on the number of steps, which is not fixed under budget.tokens; keep it constant")
    a_step = rl.updates_per_step if rl is not None else 1
    if budget.max_optimizer_steps < a_step:
        arm.refuse(
            f"budget.max_optimizer_steps {budget.max_optimizer_steps} is less than the {a_step} that an RL step makes; "
            "raise it"
        )
    lengths = _lengths(config.stages, budget.max_optimizer_steps, budget.max_optimizer_steps // a_step)
    if sft is not None:
        lengths.append(f"sft.max_tokens={sft_tokens or budget.tokens}")
    return [*lengths, f"rl.max_tokens={budget.tokens - (sft_tokens or 0)}"] if rl is not None else lengths


def _lengths_by_steps(arm: _ArmPlan, budget: BudgetConfig, config: ExperimentConfig) -> list[str]:
    """Overrides that set the number of optimizer steps, or of RL steps that sample the budget's rollouts."""
    if arm.config.sft_tokens is not None:
        arm.refuse("sft_tokens has no effect without budget.tokens; give sft_steps")
    _check_share(arm, config, "sft_steps", arm.config.sft_steps)
    sft_steps, rl = arm.config.sft_steps or 0, config.rl if "rl" in config.stages else None
    if budget.rollouts is not None:
        _refuse_sampling(arm, config, "rollouts")
        return _lengths(config.stages, sft_steps, _steps_of_rollouts(arm, budget.rollouts, config))
    assert budget.optimizer_steps is not None
    left, a_step = budget.optimizer_steps - sft_steps, 1 if rl is None else rl.updates_per_step
    if rl is None:
        sft_steps = budget.optimizer_steps
    elif left < 1 or left % a_step:
        arm.refuse(
            f"budget.optimizer_steps {budget.optimizer_steps} leaves {left} to RL, which is not a positive "
            f"multiple of the {a_step} that each RL step makes (rl.passes x rl.prompts_per_step / "
            "rl.prompts_per_update); change one of them"
        )
    rounds = config.expert_iteration.rounds if "sample" in config.stages else 1  # each has an SFT
    if sft_steps % rounds:
        arm.refuse(
            f"{sft_steps} optimizer steps of SFT are no multiple of its {rounds} rounds (expert_iteration.rounds); "
            "change one of them"
        )
    return _lengths(config.stages, sft_steps // rounds, left // a_step)


def _steps_of_rollouts(arm: _ArmPlan, rollouts: int, config: ExperimentConfig) -> int:
    """RL steps that draw as many responses, where every prompt has as many traces as the group takes."""
    if config.rl is None or config.objective is None or "rl" not in config.stages:
        arm.refuse("samples no rollouts, so a budget of rollouts does not bound it; give budget.optimizer_steps")
    group = config.objective.group
    depends = (group.prefix, group.guidance, group.hint, group.retry, group.anchor, config.objective.replay)
    if isinstance(group.filter, DynamicSampling) or any(each is not None for each in depends):
        arm.refuse(
            f"how many rollouts {config.method} samples in a step depends on their rewards (prefixes, "
            "guidance, hints, retries, anchors, dynamic sampling or replay); give budget.optimizer_steps"
        )
    traces = group.off_policy if group.off_policy_when_accuracy_at_most is None else 0
    a_step = config.rl.prompts_per_step * (group.size - traces)
    if rollouts % a_step:
        arm.refuse(
            f"samples {a_step} rollouts a step ({config.rl.prompts_per_step} prompts x {group.size - traces}), "
            f"and budget.rollouts {rollouts} is not a multiple of that"
        )
    return rollouts // a_step


def _check_equal(loaded: Mapping[str, ExperimentConfig], arms: Mapping[str, _ArmPlan]) -> None:
    """Refuse arms that differ in what must be equal, wherever the difference comes from."""
    for field in _EQUAL:
        values = {name: attrgetter(field)(config) for name, config in loaded.items() if "rl" in config.stages}
        if field == "rl.prompts_per_update":  # None: those of a step
            values = {name: value or attrgetter("rl.prompts_per_step")(loaded[name]) for name, value in values.items()}
        for name, value in values.items():
            first, expected = next(iter(values.items()))
            if value != expected:
                arms[name].refuse(
                    f"{field} is {value}, and that of arm {first} {expected}: an RL step must take the same"
                )
    first = next(iter(loaded))
    for section in ("seed", "cluster", *_SHARED[:-1]):
        for name, config in loaded.items():
            if getattr(config, section) != getattr(loaded[first], section):
                arms[name].refuse(f"{section} is not that of arm {first}; what all arms share cannot differ")


def _complaints_about_selection(config: ExperimentConfig, select: SelectConfig) -> Iterator[tuple[str, str]]:
    """By key: values of `config` cannot be chosen on `select`, or are chosen on what is reported."""
    evaluation, suites, on = config.evaluation, config.data.suites, select.on
    assert evaluation is not None
    if on == VALIDATION and on in suites:
        yield "on", "validation is also a suite of data.suites; give that another name"
    if on == VALIDATION and not config.data.validation_prompts:
        yield "on", "the validation split has no prompts; set data.validation_prompts, or name a suite"
    if on not in (*suites, VALIDATION):
        yield "on", f"no suite is called {on!r}; there are {', '.join(suites)}, or {VALIDATION}"
    if on in (evaluation.only or ()):
        yield "on", f"{on} is also reported (evaluation.only); values are not chosen on what is"
    if set(suites) == {on}:
        yield "on", f"{on} is the only suite, which leaves none to report; set one apart"
    if select.decoding not in (None, *evaluation.decodings):
        names = ", ".join(evaluation.decodings)
        yield "decoding", f"no decoding is called {select.decoding!r}; there are {names}"


def learning(config: ExperimentConfig) -> list[StageVisit]:
    """The stages after the base that make a policy, or the prompts or traces for one."""
    made = {"policy", "prompts", "traces"}
    return [
        visit
        for visit in visits_of(config)
        if visit.stage not in SHARED_NODES and made.intersection(STAGE_KINDS[visit.stage].provides)
    ]


def made_as(config: ExperimentConfig) -> str:
    """A key that is equal for experiments whose last policy, and its evaluation, are the same."""
    return _settings(config, ["prepare_data", "base", *(visit.stage for visit in learning(config)), "evaluate"])


def _settings(config: ExperimentConfig, stages: Sequence[str]) -> str:
    settings: list[StrictModel] = [CONFIGURE[stage](config) for stage in stages]
    if "sample" in stages:
        settings.append(config.expert_iteration)  # the weights that each round starts from
    return "\n".join(each.model_dump_json(context=OF_ONE_MACHINE) for each in settings)

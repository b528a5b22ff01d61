"""Every arm of a comparison at every point of its grid, sized to the budget; and that arms are comparable."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import NoReturn

from luffy.config.chain import StageNode, instances_of
from luffy.config.evaluation import VALIDATION
from luffy.config.experiment import ExperimentConfig
from luffy.config.load import chain_kinds, load_experiment
from luffy.config.many_runs.sweep_design import ArmConfig, GridPoint, SelectConfig, SweepDesign, grid_points
from luffy.config.settings import evaluate_settings, settings_of
from luffy.config.shipped import named_file
from luffy.config.strict import OF_ONE_MACHINE
from luffy.config.training import RLConfig
from luffy.config.yaml_source import KeyPath, not_among, place_of
from luffy.errors import ConfigError

SHARED_NODES = ("prepare_data", "base", "evaluate_base")
"""The stages that all runs of a comparison have in common."""
SEEDED = ("sample.seed", "sft.seed", "rl.seed")
_BUDGETED = ("rl.steps", "sft.steps", "sft.epochs")
_SHARED = ("data", "model", "base", "evaluation", "grading", "difficulty")
_NAMED = ("name", "chain", "method", "stages")
_REASONS = {
    **dict.fromkeys(_BUDGETED, "it would change the budget; set the budget of the comparison"),
    **dict.fromkeys(("seed", *SEEDED), "the comparison's seeds decide it"),
    **dict.fromkeys(_SHARED, "all arms share it, so that their stages run once; override it for all of them"),
    **dict.fromkeys(_NAMED, "the arm's chain and method, and the comparison's name, decide it"),
}
_EQUAL = (
    "rl.prompts_per_step", "rl.prompts_per_update", "rl.passes", "rl.max_response_tokens", "rl.stop", "rl.temperature",
    "objective.group.size",
)  # fmt: skip
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
    plans = {name: _ArmPlan(arm, f"{place('arms', name)}: arms.{name}") for name, arm in design.arms.items()}
    points = {name: grid_points(arm.grid or design.grid) for name, arm in design.arms.items()}
    first, *_ = plans
    for name, plan in plans.items():
        if (number := len(points[name])) != (wanted := len(points[first])):
            plan.refuse(
                f"grid: has {number} points, and that of arm {first} {wanted}: every arm needs the same number of "
                "points; change one of them"
            )
    # First one of each arm, so that a mistake of an arm is found before another arm's grid is loaded.
    loaded = {name: [_load_arm(name, plan, design, experiment, points[name][0])] for name, plan in plans.items()}
    _check_equal({name: each[0] for name, each in loaded.items()}, plans)
    for name, plan in plans.items():
        for point in points[name][1:]:
            tried = _load_arm(name, plan, design, experiment, point)
            _check_equal({first: loaded[first][0], name: tried}, plans)
            learned = [_settings_of(learning(each)) for each in (*loaded[name], tried)]
            if learned[-1] in learned[:-1]:  # fewer tries than the others get
                same = points[name][learned.index(learned[-1])].text
                plan.refuse(f"grid: {point.text} and {same} are the same run: a key changes nothing in this arm")
            loaded[name].append(tried)
    if design.select is not None:
        for key, complaint in _complaints_about_selection(loaded[first][0], design.select):
            raise ConfigError(f"{place('select', key)}: select.{key}: {complaint}")
    found = ((name, *each) for name in plans for each in zip(points[name], loaded[name], strict=True))
    return tuple(Candidate(*each) for each in found)


def _refuse_fixed(overrides: Iterable[str], fixed: Sequence[str], where: str, what: str) -> None:
    """What belongs to the comparison cannot be an arm's own, in whole or in part."""
    for given in (text.partition("=")[0] for text in overrides):
        key = of_stages(given)
        hit = next((name for name in fixed if f"{key}.".startswith(f"{name}.") or f"{name}.".startswith(f"{key}.")), "")
        if hit and key not in ("sample", "sft", "rl"):
            reason = _REASONS.get(hit, "it must be the same in all arms; override it for all of them")
            raise ConfigError(f"{where}: {what}: {given} cannot be overridden here: {reason}")
        if hit:
            raise ConfigError(f"{where}: {what}: give the fields of {given} one by one ({given}.FIELD=VALUE)")


def of_stages(key: str) -> str:
    """The field that an override of one stage changes: `rl.steps` for `stages.opd.rl.steps`."""
    parts = key.split(".")
    while parts[0] == "stages" and len(parts) > 2:
        parts = parts[2:]
    return ".".join(parts)


def _load_arm(name: str, arm: _ArmPlan, design: SweepDesign, experiment: Path, point: GridPoint) -> ExperimentConfig:
    """An arm's experiment at `point`, sized to the budget; its seeds are still those of the file."""
    own, budget = arm.config, design.budget
    assert budget is not None
    _refuse_fixed(own.overrides, (*_BUDGETED, "seed", *SEEDED, *_SHARED, *_NAMED), arm.where, "overrides")
    # How many steps an arm's share of the budget makes depends on the rest of its experiment.
    kinds, is_plain, has_methods = chain_kinds(own.chain, experiment, arm.where)
    if has_methods and own.method is not None:
        arm.refuse(f"method: {own.method} has no effect, since chain {own.chain} names that of each stage; remove it")
    if not has_methods and own.method is None:
        arm.refuse(f"method: missing, and stages of chain {own.chain} name none; give one")
    named = [f"name={design.name}.{name}", f"chain={own.chain}"]
    named += [] if own.method is None else [f"method={own.method}"]
    overrides = [*design.overrides, *own.overrides, *point.overrides, *named]
    any_length = _lengths(kinds, 10**6, 10**6) if is_plain else []
    unmeasured = load_experiment(experiment, [*overrides, *any_length], given_at=arm.where)
    if not {"sft", "rl"} & {*unmeasured.kinds}:
        arm.refuse(f"chain {own.chain} trains nothing: there is nothing to compare")
    measure = _lengths_by_steps if is_plain else _length_of_last
    lengths = measure(arm, budget.optimizer_steps, unmeasured)
    return load_experiment(experiment, [*overrides, *lengths], given_at=arm.where)


def _lengths(stages: Sequence[str], sft_steps: int, rl_steps: int) -> list[str]:
    sft = ["sft.epochs=null", f"sft.steps={sft_steps}"] if "sft" in stages else []
    return [*sft, f"rl.steps={rl_steps}"] if "rl" in stages else sft


def _lengths_by_steps(arm: _ArmPlan, budget: int, config: ExperimentConfig) -> list[str]:
    """Overrides with which the arm makes `budget` optimizer steps."""
    has_both, sft_steps = {"sft", "rl"} <= {*config.kinds}, arm.config.sft_steps or 0
    if has_both and not sft_steps:
        arm.refuse("sft_steps: missing; say how many optimizer steps SFT makes before RL")
    if sft_steps and not has_both:
        arm.refuse(f"sft_steps has no effect with chain {arm.config.chain}, which has not both SFT and RL; remove it")
    rl = config.rl if "rl" in config.kinds else None
    left, a_step = budget - sft_steps, 1 if rl is None else rl.updates_per_step
    if rl is None:
        sft_steps = budget
    elif left < 1 or left % a_step:
        arm.refuse(
            f"budget.optimizer_steps {budget} leaves {left} to RL, which is not a positive multiple of the {a_step} "
            "that each RL step makes (rl.passes x rl.prompts_per_step / rl.prompts_per_update); change one of them"
        )
    rounds = max(config.kinds.count("sft"), 1)
    if sft_steps % rounds:
        arm.refuse(f"{sft_steps} optimizer steps are no multiple of the {rounds} stages of kind sft; change one")
    return _lengths(config.kinds, sft_steps // rounds, left // a_step)


def _length_of_last(arm: _ArmPlan, budget: int, config: ExperimentConfig) -> list[str]:
    """The override with which the last stage that learns makes the optimizer steps that those before it leave, in a
    chain whose stages have lengths of their own."""
    if arm.config.sft_steps:
        arm.refuse(f"sft_steps has no effect with chain {arm.config.chain}, whose stages have their own; remove it")
    *before, last = [name for name, entry in config.stages.items() if entry.kind in ("sft", "rl")]
    left = budget
    for name in before:
        section = config.seen_by(name).sft if config.stages[name].kind == "sft" else config.seen_by(name).rl
        steps = None if section is None else section.steps
        if section is None or steps is None:
            arm.refuse(f"stages.{name}.sft.steps: missing; the budget counts optimizer steps, which epochs do not say")
        left -= steps * (section.updates_per_step if isinstance(section, RLConfig) else 1)
    kind, rl = config.stages[last].kind, config.seen_by(last).rl
    a_step = rl.updates_per_step if kind == "rl" and rl is not None else 1
    if left < 1 or left % a_step:
        arm.refuse(
            f"budget.optimizer_steps {budget} leaves {left} to {last}, which is not a positive multiple of the "
            f"{a_step} that each of its steps makes; change one of them"
        )
    by_steps = [f"stages.{last}.sft.epochs=null"] if kind == "sft" else []
    return [*by_steps, f"stages.{last}.{kind}.steps={left // a_step}"]


def _check_equal(loaded: Mapping[str, ExperimentConfig], arms: Mapping[str, _ArmPlan]) -> None:
    """Refuse arms that differ in what must be equal, wherever the difference comes from."""
    stages = [(name, config, *each) for name, config in loaded.items() for each in config.stages.items()]
    seen = [(name, config.seen_by(stage)) for name, config, stage, entry in stages if entry.kind == "rl"]
    for field in _EQUAL:
        values = [(name, attrgetter(field)(config)) for name, config in seen]
        if field == "rl.prompts_per_update":  # None: those of a step
            steps = [attrgetter("rl.prompts_per_step")(config) for _, config in seen]
            values = [(name, value or step) for (name, value), step in zip(values, steps, strict=True)]
        for name, value in values:
            first, expected = values[0]
            if value != expected:
                arms[name].refuse(f"{field} is {value}, and of arm {first} {expected}: RL steps must take the same")
    for name, _, stage, entry in stages:
        if shared := next((own for own in entry.own if own in ("seed", *_SHARED)), None):
            arms[name].refuse(f"stages.{stage}.{shared}: {_REASONS[shared]}")
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
        yield "on", f"no suite is called {not_among(on, [*suites, VALIDATION])}"
    if on in (evaluation.only or ()):
        yield "on", f"{on} is also reported (evaluation.only); values are not chosen on what is"
    if set(suites) == {on}:
        yield "on", f"{on} is the only suite, which leaves none to report; set one apart"
    if select.decoding is not None and select.decoding not in evaluation.decodings:
        yield "decoding", f"no decoding is called {not_among(select.decoding, evaluation.decodings)}"


def learning(config: ExperimentConfig) -> list[StageNode]:
    """The stages after the base that make a policy, or the prompts or traces for one."""
    made = {"policy", "prompts", "traces"}
    found = (each for each in instances_of(config) if each.kind.name not in SHARED_NODES)
    return [each for each in found if made.intersection(each.provides)]


def made_as(config: ExperimentConfig) -> str:
    """A key that is equal for experiments whose last policy, and its evaluation, are the same."""
    wanted = {"prepare_data", "base", *(each.name for each in learning(config))}
    instances = instances_of(config)
    made = _settings_of(each for each in instances if each.name in wanted)
    how = [settings_of(each) for each in instances if each.kind.name == "evaluate"][-1:] or [evaluate_settings(config)]
    return f"{made}\n{how[0].model_dump_json(context=OF_ONE_MACHINE)}"


def _settings_of(stages: Iterable[StageNode]) -> str:
    """What these stages are made from, and by which settings."""
    return "\n".join(f"{each.inputs} {settings_of(each).model_dump_json(context=OF_ONE_MACHINE)}" for each in stages)

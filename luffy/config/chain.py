"""The stages of a chain: named instances of the kinds, each with what it reads and what differs for it.

An experiment's `stages` are entries. An entry is the name of a kind, or `NAME: {kind, inputs, method, SECTION...}`: the
stage sees the experiment with those sections in place of its own (`ExperimentConfig.seen_by`). `load_experiment` has
merged what the entry gives over the experiment's section, and written out groups that repeat (`luffy.config.entries`),
so that here every section is whole.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pydantic import Field, JsonValue, NonNegativeInt

from luffy.config.answers import DifficultyConfig, SampleConfig
from luffy.config.data import DataConfig
from luffy.config.environment import EnvironmentConfig
from luffy.config.evaluation import EvaluationConfig
from luffy.config.execution import ExecutionConfig
from luffy.config.grading import GradingConfig
from luffy.config.model import ModelConfig
from luffy.config.objective import ObjectiveConfig
from luffy.config.stage_kinds import CHAIN_KINDS, STAGE_KINDS, Role, StageKind, StageName, kind_of
from luffy.config.strict import StrictModel
from luffy.config.training import BaseConfig, RLConfig, SFTConfig
from luffy.config.yaml_source import not_among

if TYPE_CHECKING:
    from luffy.config.experiment import ExperimentConfig


def by_name(stages: object) -> object:
    """A recorded list of entries, of which `rl` stands for `rl: {kind: rl}`, by their names; anything else as it is."""
    if not isinstance(stages, list):
        return stages
    entries = [{each: {}} if isinstance(each, str) else each for each in stages]
    if not all(isinstance(each, dict) and all(isinstance(own, dict) for own in each.values()) for each in entries):
        return stages  # no version has written that
    return {name: {"kind": name, **own} for each in entries for name, own in each.items()}


_NO_SECTIONS = {"kind", "inputs", "method", "options", "group"}
EVERY_STAGE = ("seed", "execution")
"""What every stage may have of its own, beside the sections that its kind reads."""


class StageEntry(StrictModel):
    """One stage of a chain, or with `kind: evaluate` one for each policy that it evaluates."""

    kind: StageName
    """By default the entry's name."""
    inputs: dict[str, str | tuple[str, ...]] = Field(default_factory=dict)
    """Input name (`data`, `model`) to the stage that provides it, by default the newest one that does. An evaluation
    takes a list of models."""
    method: str | None = None
    """The preset in `exp_configs/methods/` of this stage alone."""
    options: dict[str, JsonValue] = Field(default_factory=dict)
    """Settings of a kind of the user's own."""
    group: str | None = None
    """What `--only` may call it beside its name and kind: the group of repeated stages that it was written out from."""
    seed: NonNegativeInt | None = None
    data: DataConfig | None = None
    model: ModelConfig | None = None
    base: BaseConfig | None = None
    difficulty: DifficultyConfig | None = None
    sample: SampleConfig | None = None
    sft: SFTConfig | None = None
    rl: RLConfig | None = None
    objective: ObjectiveConfig | None = None
    evaluation: EvaluationConfig | None = None
    grading: GradingConfig | None = None
    environment: EnvironmentConfig | None = None
    execution: ExecutionConfig | None = None

    @property
    def own(self) -> dict[str, object]:
        """The sections that are its own, and its seed."""
        given = self.model_fields_set - _NO_SECTIONS
        return {name: getattr(self, name) for name in type(self).model_fields if name in given}

    @property
    def differs(self) -> bool:
        """Whether the stage sees another experiment than a plain one."""
        return bool(self.own) or self.method is not None


def plain_stages(kinds: Iterable[str]) -> dict[str, StageEntry]:
    """Stages of these kinds, which have nothing of their own."""
    return {kind: StageEntry(kind=kind) for kind in kinds}


SECTIONS = tuple(name for name in StageEntry.model_fields if name not in _NO_SECTIONS)
"""What a stage may have of its own."""


_INPUTS = ("held_out", *{name for kind in STAGE_KINDS.values() for name in kind.inputs})


@dataclass(frozen=True, slots=True)
class View:
    """The experiment as some of its stages see it."""

    name: str
    """The one stage with this view; empty for the view of all that have nothing of their own."""
    config: "ExperimentConfig"
    kinds: frozenset[str]
    """The kinds of these stages."""


@dataclass(frozen=True, slots=True)
class StageNode:
    """A stage of the chain."""

    name: str
    """Unique in the chain: that of its entry, or one derived from what it evaluates (`evaluate_rl`)."""
    kind: StageKind
    inputs: Mapping[str, str]
    """Input name to the name of the node that provides it."""
    config: "ExperimentConfig"
    """The experiment as this stage sees it."""
    provides: tuple[Role, ...] = ()
    options: Mapping[str, JsonValue] = field(default_factory=dict)
    groups: tuple[str, ...] = ()
    """The names of its entry, and of the group of repeated stages that this is in."""
    settings: StrictModel = field(default_factory=StrictModel)
    """Those of its program, which `luffy.pipeline.graph.build_graph` adds."""

    @property
    def stage(self) -> str:
        """Its kind's name."""
        return self.kind.name


def views_of(config: "ExperimentConfig") -> tuple[View, ...]:
    """The different views of the stages; one, where none has anything of its own."""
    plain = frozenset(entry.kind for entry in config.stages.values() if not entry.differs)
    own = {name: entry for name, entry in config.stages.items() if entry.differs}
    others = [View(name, config.seen_by(name), frozenset([entry.kind])) for name, entry in own.items()]
    return (View("", config, plain), *others)


def instances_of(config: "ExperimentConfig") -> tuple[StageNode, ...]:
    """The stages of a valid experiment, each after those that it reads from."""
    made: list[StageNode] = []
    for name, entry in config.stages.items():
        made += _instances(name, entry, config.seen_by(name), made)
    return tuple(made)


def _instances(
    name: str, entry: StageEntry, config: "ExperimentConfig", before: list[StageNode]
) -> Iterator[StageNode]:
    kind = kind_of(entry.kind)
    roles, provides = kind.inputs_in(config), kind.provides_in(config)
    shared = {key: role for key, role in roles.items() if role != kind.for_each}
    inputs = {key: str(entry.inputs.get(key) or newest(before, role)) for key, role in shared.items()}
    if kind.reads_all:
        inputs |= {made.name: made.name for made in before if made.name not in inputs.values()}
    groups = (name,) if entry.group is None else (name, entry.group)
    if kind.for_each is None:
        yield StageNode(name, kind, inputs, config, provides, entry.options, groups)
        return
    each = next(role_name for role_name, role in roles.items() if role == kind.for_each)
    asked = entry.inputs.get(each)
    wanted = (asked,) if isinstance(asked, str) else asked
    prefix = kind.name if name == kind.name else f"{kind.name}_{name}"
    for made in before:
        if kind.for_each in made.provides and (wanted is None or made.name in wanted):
            read = {**inputs, each: made.name}
            yield StageNode(f"{prefix}_{made.name}", kind, read, config, provides, entry.options, groups)


def sections_of(kind: StageKind) -> tuple[str, ...]:
    """The sections that a stage of this kind reads; with a class of its own those that its fields are called by."""
    named = kind.settings.model_fields if kind.settings is not None else {}
    return kind.reads or tuple(name for name in SECTIONS if name in named and name not in EVERY_STAGE)


def newest(before: list[StageNode], role: Role) -> str:
    """The last of these stages that provides the role."""
    return next(made.name for made in reversed(before) if role in made.provides)


def broken_chain(config: "ExperimentConfig") -> Iterator[str]:
    """What is wrong with the order of the stages and with their inputs."""
    start = ("prepare_data", "base")
    if missing := [stage for stage in start if stage not in config.kinds]:
        yield f"stages: {', '.join(missing)} missing; every chain starts with {', '.join(start)}"
    before: list[StageNode] = []
    for name, entry in config.stages.items():
        kind, seen = kind_of(entry.kind), config.seen_by(name)
        if not kind.is_in_chains:
            yield f"stages.{name}: {kind.name} is no stage of a chain; {', '.join(CHAIN_KINDS)} are"
        reads = (*sections_of(kind), *EVERY_STAGE)
        roles, where = kind.inputs_in(seen), f"stages.{name}"
        provided = {role for made in before for role in made.provides}
        for role in (*roles.values(), *kind.requires):
            if role not in provided:
                makers = [each.name for each in STAGE_KINDS.values() if role in each.provides and each.is_in_chains]
                yield f"stages: {name} needs {makers[0]} before it"
        if entry.options and not kind.origin:
            yield f"{where}.options: are for kinds of your own; those of {kind.name} are in {', '.join(reads)}"
        sampling = seen.rl.sampling if kind.name == "rl" and seen.rl is not None else None
        is_early = "difficulty" in config.kinds and "difficulty" not in {made.kind.name for made in before}
        if is_early and getattr(sampling, "by", None) == "difficulty":
            yield f"stages: {name} sorts by what difficulty measures; put difficulty before it, or use trace_length"
        section = getattr(seen, kind.name, None)
        if entry.seed is not None and (kind.reads_all or getattr(section, "seed", None) is not None):
            why = "" if kind.reads_all else f" beside {kind.name}.seed"
            yield f"{where}.seed: has no effect{why}; remove one of them"
        yield from _unused_parts(where, entry, kind, config)
        if name in _INPUTS:
            yield f"{where}: {name} is the name of an input; give the stage another one"
        yield from _broken_inputs(where, entry, roles, before)
        made = {each.name for each in before}
        for instance in _instances(name, entry, seen, before):
            if instance.name in made:
                yield f"stages: {instance.name} is there twice; give {name} another name"
            before.append(instance)


def _unused_parts(where: str, entry: StageEntry, kind: StageKind, config: "ExperimentConfig") -> Iterator[str]:
    """Fields of a stage's own `model` or `data` that it does not use: the policy and the prompts are its inputs."""
    used = {"model": ("dtype", "lora")} | ({"data": ("rl",)} if kind.name == "rl" else {})
    for section, fields in used.items() if kind.name not in ("prepare_data", "base") and not kind.origin else ():
        own, shared = getattr(entry, section), getattr(config, section)
        names = [name for name in type(shared).model_fields if own is not None and name not in fields]
        if changed := next((name for name in names if getattr(own, name) != getattr(shared, name)), None):
            yield f"{where}.{section}.{changed}: has no effect on {kind.name}, which takes its inputs; remove it"


def _broken_inputs(where: str, entry: StageEntry, roles: Mapping[str, Role], before: list[StageNode]) -> Iterator[str]:
    kind = kind_of(entry.kind)
    for name, asked in entry.inputs.items():
        if name not in roles:
            yield f"{where}.inputs.{name}: no such input of a stage of kind {kind.name}: {not_among(name, roles)}"
            continue
        if not asked:
            yield f"{where}.inputs.{name}: names no stage; remove it"
        if not isinstance(asked, str) and roles[name] != kind.for_each:
            yield f"{where}.inputs.{name}: must be the name of one stage"
        for source in (asked,) if isinstance(asked, str) else asked:
            able = [made.name for made in before if roles[name] in made.provides]
            if source not in able:
                yield f"{where}.inputs.{name}: no earlier stage provides {roles[name]} as {not_among(source, able)}"

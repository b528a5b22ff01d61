"""An experiment's chain as data: one node for each stage that it makes, with what the stage reads.

This module alone defines which stages exist and how they depend on each other. Flows walk these nodes; plans,
comparisons, the report and garbage collection read them. Code that only has a run's record looks up nodes by name.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from luffy.config import STAGE_KINDS, ExperimentConfig
from luffy.config.experiment import visits_of
from luffy.config.settings import CONFIGURE, SampleSettings, StageSettings, SweepSettings, evaluate_settings
from luffy.config.stage_kinds import Role, StageKind, ViewName
from luffy.errors import UserError


@dataclass(frozen=True, slots=True)
class StageNode:
    """One stage of the chain."""

    name: str
    """Unique in the chain: the stage's own name (`rl`, `sft_2`), or one derived from what it evaluates
    (`evaluate_rl`)."""
    stage: str
    """Its kind's name."""
    inputs: Mapping[str, str]
    """Input name to the name of the node that provides it."""
    settings: StageSettings

    @property
    def kind(self) -> StageKind:
        return STAGE_KINDS[self.stage]

    @property
    def provides(self) -> tuple[Role, ...]:
        return self.kind.provides_of(self.settings)


def build_graph(config: ExperimentConfig, sweep_steps: tuple[int, ...] = ()) -> tuple[StageNode, ...]:
    """The stages of `config`, each after the ones it reads from; with `sweep_steps` the sweep over them comes last."""
    nodes: list[StageNode] = []
    for visit in visits_of(config):
        kind = STAGE_KINDS[visit.stage]
        settings, before = CONFIGURE[visit.stage](config), tuple(nodes)
        if isinstance(settings, SampleSettings):
            settings = settings.model_copy(update={"round": visit.round or 1})
        made = _nodes(visit.name, kind, settings, before)
        if visit.stage == "sft" and visit.round and config.expert_iteration.start_from == "base":
            sampled_first = next(node.inputs["model"] for node in before if node.stage == "sample")
            made = [replace(node, inputs={**node.inputs, "model": sampled_first}) for node in made]
        nodes += made
    if sweep_steps:
        sweep = SweepSettings(protocol=evaluate_settings(config), steps=sweep_steps)
        nodes += _nodes("sweep", STAGE_KINDS["sweep"], sweep, nodes)
    return tuple(nodes)


def select_nodes(nodes: Sequence[StageNode], names: Iterable[str], option: str) -> frozenset[str]:
    """The names of the nodes that `names` mean: nodes themselves, or all of a kind. UserError naming `option`."""
    found: set[str] = set()
    for name in names:
        meant = {node.name for node in nodes if name in (node.name, node.stage)}
        if not meant:
            there = ", ".join(node.name for node in nodes)
            raise UserError(f"{option} {name}: this chain has no such stage; it has {there}")
        found |= meant
    return frozenset(found)


def kind_of(name: str) -> StageKind | None:
    """The kind of the node `name`; None for a name that no chain of this version has."""
    stages = [stage for stage in STAGE_KINDS if name == stage or name.startswith(f"{stage}_")]
    return STAGE_KINDS[max(stages, key=len)] if stages else None


def nodes_showing(view: ViewName, names: Iterable[str]) -> list[str]:
    """The node names in `names` whose kind has `view`."""
    return [name for name in names if (kind := kind_of(name)) is not None and view in kind.views]


def nodes_providing(role: Role, names: Iterable[str]) -> list[str]:
    """The node names in `names` whose kind provides `role`."""
    return [name for name in names if (kind := kind_of(name)) is not None and role in kind.provides]


def _nodes(name: str, kind: StageKind, settings: StageSettings, before: Sequence[StageNode]) -> list[StageNode]:
    """The nodes of one stage after those in `before`: one, or one for each result of the role `kind.for_each`."""
    results = [None] if kind.for_each is None else [node for node in before if kind.for_each in node.provides]
    found = []
    for result in results:
        inputs = {
            entry: next(node.name for node in reversed(before) if role in node.provides)
            for entry, role in kind.inputs_of(settings).items()
        }
        if kind.reads_all:
            inputs |= {node.name: node.name for node in before if node.name not in inputs.values()}
        if result is not None:
            inputs |= {entry: result.name for entry, role in kind.inputs.items() if role == kind.for_each}
        found.append(StageNode(f"{name}_{result.name}" if result else name, kind.name, inputs, settings))
    return found

"""An experiment's chain as data: one node for each stage that it makes, with what the stage reads.

Flows walk these nodes; plans, comparisons, the report and garbage collection read them. Code that only has a run's
record knows the kind of each stage from the folder of its result.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from luffy.config import STAGE_KINDS, ExperimentConfig
from luffy.config.chain import StageNode, instances_of
from luffy.config.settings import SampleSettings, SweepSettings, evaluate_settings, settings_of
from luffy.config.stage_kinds import Role, ViewName
from luffy.errors import UserError


def build_graph(config: ExperimentConfig, sweep_steps: tuple[int, ...] = ()) -> tuple[StageNode, ...]:
    """The stages of `config`, each after the ones it reads from; with `sweep_steps` the sweep over them comes last."""
    nodes: list[StageNode] = []
    rounds = 0
    for node in instances_of(config):
        settings = settings_of(node)
        if isinstance(settings, SampleSettings) and not settings.sample.teachers:
            rounds += 1  # each samples with seeds of its own
            settings = settings.model_copy(update={"round": rounds})
        nodes.append(replace(node, settings=settings))
    if sweep_steps:
        rl = [node for node in nodes if node.stage == "rl"][-1]
        data = [node.name for node in nodes if "data" in node.kind.provides][-1]
        sweep = SweepSettings(protocol=evaluate_settings(config), steps=sweep_steps)
        read = {"data": data, "model": rl.name}
        nodes.append(StageNode("sweep", STAGE_KINDS["sweep"], read, config, settings=sweep))
    return tuple(nodes)


def select_nodes(nodes: Sequence[StageNode], names: Iterable[str], option: str) -> frozenset[str]:
    """The names of the nodes that `names` mean: nodes, or all of a kind or group. UserError naming `option`."""
    found: set[str] = set()
    for name in names:
        meant = {node.name for node in nodes if name in (node.name, node.stage, *node.groups)}
        if not meant:
            there = ", ".join(node.name for node in nodes)
            raise UserError(f"{option} {name}: this chain has no such stage; it has {there}")
        found |= meant
    return frozenset(found)


def showing(view: ViewName, kinds: Mapping[str, str]) -> list[str]:
    """The stages in `kinds` (by name the name of the kind) whose kind has `view`."""
    return [name for name, kind in kinds.items() if kind in STAGE_KINDS and view in STAGE_KINDS[kind].views]


def providing(role: Role, kinds: Mapping[str, str]) -> list[str]:
    """The stages in `kinds` (by name the name of the kind) whose kind provides `role`."""
    return [name for name, kind in kinds.items() if kind in STAGE_KINDS and role in STAGE_KINDS[kind].provides]

"""Names of the rows of the leaderboard: the runs that made them, and the settings that distinguish them."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

from luffy.config import STAGE_KINDS, ExperimentConfig
from luffy.config.model import model_name
from luffy.config.settings import SETTINGS
from luffy.config.stage_kinds import STAGE_ORDER, StageKind
from luffy.config.strict import run_name
from luffy.evaluation.results import checkpoint_name
from luffy.pipeline.graph import kind_of, nodes_providing
from luffy.pipeline.identity import Json
from luffy.pipeline.plan import flatten
from luffy.pipeline.records import RunRecord, list_records
from luffy.pipeline.workspace import Workspace

_NODE_PREFIX = "evaluate_"
_SWEEP = "sweep"
_ELSEWHERE = ("data.suites", "data.decontamination", "rl.steps")
"""Settings that the table's columns, or the row itself, already show."""
_SHOWN = 3
_LONGEST_VALUE = 40


@dataclass(frozen=True, slots=True)
class Use:
    """An evaluation as a run used it."""

    record: RunRecord
    node: str
    """`evaluate_base`, `evaluate_sft`, `evaluate_rl`, or `sweep`."""

    @property
    def checkpoint(self) -> str:
        """`base`, `sft` or `rl`."""
        return "rl" if self.node == _SWEEP else self.node.removeprefix(_NODE_PREFIX)


@dataclass(frozen=True, slots=True)
class RowName:
    """The name of a row."""

    experiment: str
    """Experiments of all runs that share the model; empty where no run is left."""
    method: str
    """Method of the last stage that trains; empty before that stage."""
    checkpoint: str
    variant: str = ""
    """The settings that distinguish it from other rows of that name."""

    @property
    def text(self) -> str:
        """The name in one line."""
        parts = (self.experiment, self.method, self.checkpoint, self.variant)
        return " · ".join(part for part in parts if part)


def read_uses(workspace: Workspace) -> dict[str, list[Use]]:
    """Key of an evaluation to the runs that used it, the oldest first; unreadable records are passed over."""
    uses: dict[str, list[Use]] = {}
    for record in sorted(list_records(workspace), key=lambda record: (str(record.started), record.name)):
        known = isinstance(record.config, dict) and record.config
        for node in nodes_providing("evaluation", record.stages) if known else ():
            uses.setdefault(record.stages[node].key, []).append(Use(record, node))
    return uses


def name_row(uses: Sequence[Use], checkpoint: str, step: int | None) -> RowName:
    """The name by the runs that `uses` lists; `checkpoint` is what the evaluation itself calls its model."""
    if not uses:
        return RowName("", "", _checkpoint(checkpoint, {}, step))
    newest = uses[-1]
    config, method = newest.record.config, ""
    stages = config.get("stages")
    _, *trained = nodes_providing("policy", map(str, stages) if isinstance(stages, list) else ()) or [""]
    if trained[-1:] == [newest.checkpoint]:
        method = str(config.get("method") or ("own objective" if config.get("objective") else ""))
    shown = _checkpoint(newest.checkpoint, config, step)
    experiments = dict.fromkeys(use.record.experiment or use.record.name for use in uses)
    # One without an experiment's file is named after its model.
    return RowName(", ".join(name for name in experiments if name != run_name(shown)), method, shown)


def tell_apart(names: Sequence[RowName], uses: Sequence[Sequence[Use]], fallback: Sequence[str]) -> list[RowName]:
    """`names`, with the differing settings added to equal ones; `fallback` if the runs' records do not hold them."""
    variants = list(names)
    for name in dict.fromkeys(names):
        alike = [i for i, other in enumerate(names) if other == name]
        if len(alike) == 1:
            continue
        words = _differences([_relevant(uses[i]) for i in alike])
        for i, variant in zip(alike, words, strict=True):
            parts = (variant, fallback[i] if words.count(variant) > 1 else "")
            variants[i] = replace(name, variant=", ".join(part for part in parts if part))
    return variants


def section(values: Mapping[str, object], name: str) -> Mapping[str, object]:
    """The mapping under that name; empty where there is none."""
    value = values.get(name)
    return value if isinstance(value, Mapping) else {}


def leaves_of(values: object) -> dict[str, str]:
    """The leaves of what a JSON file holds, `rl.optimizer.lr` to their text."""
    leaves = ((name, value) for name, value in flatten(cast(Json, values)) if value != {})
    return {name: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False) for name, value in leaves}


def _checkpoint(checkpoint: str, config: Mapping[str, object], step: int | None) -> str:
    if checkpoint == "base":
        return model_name(section(config, "model")) or checkpoint_name("base")
    steps = step if step is not None else section(config, "rl").get("steps") if checkpoint == "rl" else None
    return checkpoint_name(checkpoint) + (f" step {steps}" if steps is not None else "")


def _relevant(uses: Sequence[Use]) -> dict[str, str]:
    """The newest use's settings in the sections of an experiment that its checkpoint depends on: what the checkpoint's
    stage and those before it are given."""
    if not uses or (kind := kind_of(uses[-1].checkpoint)) is None:
        return {}
    given = {field for maker in _makers(kind) for field in SETTINGS[maker.name].model_fields}
    sections = [name for name in ExperimentConfig.model_fields if name in given]
    leaves = leaves_of({name: uses[-1].record.config.get(name) for name in sections})
    return {
        name: value
        for name, value in leaves.items()
        if not any(name == other or name.startswith(f"{other}.") for other in _ELSEWHERE)
    }


def _makers(kind: StageKind) -> Iterator[StageKind]:
    """The kind itself, and all whose results it depends on; some of them several times."""
    yield kind
    for earlier in (STAGE_KINDS[stage] for stage in STAGE_ORDER[: STAGE_ORDER.index(kind.name)]):
        if {*earlier.provides} & {*kind.inputs.values()}:
            yield from _makers(earlier)


def _differences(settings: Sequence[Mapping[str, str]]) -> list[str]:
    def short(value: str) -> str:
        return value if len(value) <= _LONGEST_VALUE else f"{value[: _LONGEST_VALUE - 1]}…"

    names = list(dict.fromkeys(name for leaves in settings for name in leaves))
    differing = [name for name in names if len({leaves.get(name) for leaves in settings}) > 1]
    more = f" and {len(differing) - _SHOWN} more" if len(differing) > _SHOWN else ""
    return [
        ", ".join(f"{name}={short(leaves[name])}" for name in differing[:_SHOWN] if name in leaves) + more
        for leaves in settings
    ]

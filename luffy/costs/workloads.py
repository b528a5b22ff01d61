"""What the speed of a stage depends on: the machine, the model, the data, and the settings that are not about learning.

Two stages with equal workloads take equally long for each step, so a measurement of one predicts the other.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from luffy.config import STAGE_KINDS, ExperimentConfig
from luffy.config.execution import ExecutionConfig
from luffy.pipeline.chain.graph import StageNode
from luffy.pipeline.chain.identity import Json, canonical_json, identifying
from luffy.pipeline.chain.manifest import Manifest, read_manifest
from luffy.pipeline.chain.provenance import hardware
from luffy.pipeline.machine.gpus import gpu_names
from luffy.pipeline.workspace import Workspace

_KEY_LENGTH = 16
_NOT_ABOUT_SPEED = {
    "checkpoint", "gpu_memory_gb", "grace_s", "log_level", "max_logp_gap", "parallel_stages", "retries",
    "retry_delay_s", "server", "time_limits_s",
}  # fmt: skip
"""Fields of `execution` that change no step's time."""
_NOT_TIMED = {"base": ("steps", "optimizer"), "sft": ("optimizer",), "rl": ("steps", "optimizer")}
"""Fields of a stage's own section that change no step's time."""
_ON_CLUSTER = ("sft", "rl")
"""Stages that run where `cluster` says."""
_RAY_LOGS = "logs"
"""Folder in a stage's directory in which processes under Ray write."""


@dataclass(frozen=True, slots=True)
class Workload:
    """The workload of one stage."""

    machine: str
    stage: str
    cluster: str
    settings: dict[str, Json]
    execution: dict[str, Json]
    model: Json
    data: Json

    @property
    def key(self) -> str:
        """Sixteen hex digits."""
        return hashlib.sha256(canonical_json(asdict(self)).encode()).hexdigest()[:_KEY_LENGTH]


def record_name(node: StageNode) -> str:
    """Under which name the times of a stage are kept: its kind, but for evaluations, whose policies differ."""
    return node.name if node.stage == "evaluate" else node.stage


def this_machine() -> str:
    """CPU, number of cores and kinds of GPUs, in words; equal on machines that should be equally fast."""
    return _machine(hardware(), gpu_names())


def workload_of(config: ExperimentConfig, nodes: Sequence[StageNode], node: StageNode, machine: str) -> Workload:
    """The workload of `node` in the chain `nodes` of `config`."""
    made = {other.stage: identifying(other.settings) for other in nodes}
    return Workload(
        machine,
        node.stage,
        config.cluster if node.stage in _ON_CLUSTER else "local",
        _timed(node.stage, identifying(node.settings)),
        _layout(config.execution),
        made["base"]["model"] if "base" in made else None,
        made["prepare_data"]["data"] if "prepare_data" in made else None,
    )


def finished_workload(workspace: Workspace, directory: Path, manifest: Manifest) -> Workload | None:
    """The workload of a finished stage; None where what it was made from is gone."""
    base = _origin(workspace, manifest, "model", "base")
    data = _origin(workspace, manifest, "data", "prepare_data")
    if base is None or data is None:
        return None
    names = manifest.hardware.get("gpu", "")
    return Workload(
        _machine(manifest.hardware, names.split(", ") if names else []),
        manifest.stage,
        "ray" if manifest.stage in _ON_CLUSTER and (directory / _RAY_LOGS).is_dir() else "local",
        _timed(manifest.stage, dict(manifest.settings)),  # type: ignore[arg-type]  # read from JSON
        _layout(manifest.execution),
        base.settings["model"],  # type: ignore[arg-type]
        data.settings["data"],  # type: ignore[arg-type]
    )


def _machine(facts: Mapping[str, str], gpus: Sequence[str]) -> str:
    return ", ".join([facts.get("cpu", "?"), f"{facts.get('cpu_cores', '?')} cores", *sorted(set(gpus))])


def _timed(stage: str, settings: dict[str, Json]) -> dict[str, Json]:
    timed = {name: value for name, value in settings.items() if name not in ("seed", "round", "validation")}
    section = timed.get(stage)
    if isinstance(section, dict):
        timed[stage] = {name: value for name, value in section.items() if name not in _NOT_TIMED.get(stage, ())}
    return timed


def _layout(execution: ExecutionConfig) -> dict[str, Json]:
    return execution.model_dump(mode="json", exclude=_NOT_ABOUT_SPEED)


def _origin(workspace: Workspace, manifest: Manifest, entry: str, stage: str) -> Manifest | None:
    """The result of `stage` from which `manifest` was made, along the inputs called `entry`."""
    found: Manifest | None = manifest
    while found is not None and found.stage != stage:
        key = found.upstream.get(entry)
        found = None if key is None else _result(workspace, key)
    return found


def _result(workspace: Workspace, key: str) -> Manifest | None:
    manifests = (read_manifest(workspace.stage_directory(stage, key)) for stage in STAGE_KINDS)
    return next((manifest for manifest in manifests if manifest is not None), None)

"""Other placements of an experiment on the same number of GPUs (without GPUs: of processes)."""

from dataclasses import dataclass

from pydantic import ValidationError

from luffy.config import ExperimentConfig
from luffy.config.execution import ExecutionConfig
from luffy.config.stage_kinds import cluster_gpus
from luffy.pipeline.machine.resources import find_resources

_ZERO_STAGES = (0, 1, 2, 3)


@dataclass(frozen=True, slots=True)
class TrialLayout:
    """One placement."""

    words: str
    config: ExperimentConfig


def splits(config: ExperimentConfig) -> list[TrialLayout]:
    """The ways to share the GPUs among trainer ranks and engines that fit by the estimate, the configured one first.

    Only the configured one where there is no choice: in one process, or without engines of its own.
    """
    ray, ways = config.execution.ray, config.execution.vllm.tensor_parallel_size
    own = TrialLayout(_words(config), config)
    if config.cluster == "local" or not config.num_engines:
        return [own]
    total = cluster_gpus(config)
    candidates: list[dict[str, object]] = [
        {"trainer_ranks": total - engines * ways, "engines": engines, "placement": "disaggregated"}
        for engines in range(1, (total - 1) // ways + 1)
    ]
    if ways == 1:
        candidates.append({"trainer_ranks": total, "engines": total, "placement": "colocated"})
    others = (_changed(config, {"ray": ray.model_dump() | candidate}) for candidate in candidates)
    return _distinct([own, *others])


def zero_stages(config: ExperimentConfig) -> list[TrialLayout]:
    """The layout under every ZeRO stage that fits, its own first; only its own with a single rank."""
    own = TrialLayout(_words(config), config)
    if config.cluster == "local" or config.execution.ray.trainer_ranks == 1:
        return [own]
    return _distinct([own, *(_changed(config, {"zero_stage": stage}) for stage in _ZERO_STAGES)])


def _changed(config: ExperimentConfig, changes: dict[str, object]) -> TrialLayout | None:
    """The experiment with another layout; None where the configuration or the estimate refuses it."""
    try:
        execution = ExecutionConfig.model_validate(config.execution.model_dump() | changes)
        changed = ExperimentConfig.model_validate(dict(config) | {"execution": execution})
    except ValidationError:
        return None
    return None if find_resources(changed).complaints else TrialLayout(_words(changed), changed)


def _distinct(layouts: list[TrialLayout | None]) -> list[TrialLayout]:
    """Those that are possible, each once, in order."""
    found: dict[str, TrialLayout] = {}
    for layout in layouts:
        if layout is not None:
            found.setdefault(layout.words, layout)
    return list(found.values())


def _words(config: ExperimentConfig) -> str:
    execution, ray = config.execution, config.execution.ray
    if config.cluster == "local":
        return "one process"
    engines = f" and {_counted(ray.engines, 'engine')}, {ray.placement}" if config.num_engines else ""
    return f"{_counted(ray.trainer_ranks, 'trainer rank')}{engines}, ZeRO {execution.zero_stage}"


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"

"""Search for the nearest layout that fits an experiment's GPUs, to suggest it where the configured one does not.

The search varies the execution settings that free memory and change no result. Each change has a price, roughly its
cost in speed, and the nearest layout is the cheapest one without complaints. The prices are rules of thumb, not
measurements.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

from pydantic import ValidationError

from luffy.config import ExperimentConfig
from luffy.config.execution import ExecutionConfig
from luffy.config.stage_kinds import cluster_gpus, engine_gpus
from luffy.pipeline.machine.layout_checks import Placement, complaints_about, divides

Changes = Mapping[str, object]
"""Settings by their name below `execution`, with their new values."""
_SHARES = tuple(round(0.05 * step, 2) for step in range(4, 20))
"""Shares of a GPU's memory for an engine that are tried."""
_MOST_WAYS = 8
"""Largest tensor parallelism tried where the number of GPUs is unknown."""
_FEWEST_TOKENS = 256
"""Smallest micro-batch and smallest chunk of logits that are tried."""
_HALVINGS = 5
_CHANGE = 2.0
"""Price of each changed setting, besides the following."""
_PRICES = {
    "logprob_chunk_tokens": 1.0,  # a halving
    "rollout_batch_size": 4.0,  # a halving
    "micro_batch_tokens": 2.0,  # a halving
    "ray.trainer_ranks": 3.0,  # a doubling
    "vllm.gpu_memory_utilization": 0.5,  # 5 % of a GPU
    "vllm.tensor_parallel_size": 6.0,  # a doubling
    "zero_stage": 6.0,  # a stage
    "gradient_checkpointing": 12.0,
    "offload_optimizer": 30.0,
    "offload_parameters": 40.0,
}
_SAVING = {
    "logprob_chunk_tokens",
    "rollout_batch_size",
    "micro_batch_tokens",
    "gradient_checkpointing",
    "offload_optimizer",
}
"""Settings whose choices need less memory from the first to the last."""


@dataclass(frozen=True, slots=True)
class _Choice:
    changes: Changes
    price: float


_Axis = list[_Choice]
"""The choices for one setting; the first one is its current value."""


def nearest_layout(placement: Placement) -> tuple[str, ...] | None:
    """Overrides (`execution.zero_stage=3`) that make everything fit; None where no layout does."""
    axes = list(_axes(placement))
    # A few hundred layouts, with all memory savings switched on, decide whether any of ten thousand fits.
    least = [axis[-1:] if axis[-1].changes.keys() & _SAVING else axis for axis in axes]
    if _first_that_fits(placement, least) is None:
        return None
    found = _first_that_fits(placement, axes)
    assert found is not None
    return tuple(f"execution.{name}={_as_yaml(value)}" for name, value in found.items())


def _first_that_fits(placement: Placement, axes: Sequence[_Axis]) -> Changes | None:
    """The changes of the cheapest layout that fits, among all combinations."""
    for choice in sorted(map(_joined, product(*axes)), key=lambda choice: choice.price):
        changes = _with_counts(placement, choice.changes)
        config = _changed(placement.config, changes)
        if config is not None and not complaints_about(replace(placement, config=config)):
            return changes
    return None


def _joined(choices: Sequence[_Choice]) -> _Choice:
    changes = {name: value for choice in choices for name, value in choice.changes.items()}
    return _Choice(changes, sum(choice.price for choice in choices))


def _axes(placement: Placement) -> Iterator[_Axis]:
    execution = placement.config.execution
    if placement.trains_on_ray:
        yield _axis("ray.trainer_ranks", _more_ranks(placement))
        yield _more_sharded(execution)
        for switch in ("gradient_checkpointing", "offload_optimizer"):
            yield _axis(switch, [] if getattr(execution, switch) else [(True, 1)])
        yield _axis("micro_batch_tokens", _halved(execution.micro_batch_tokens, _FEWEST_TOKENS))
        yield _axis("logprob_chunk_tokens", _halved(execution.logprob_chunk_tokens, _FEWEST_TOKENS))
    if placement.embeds_engine:
        yield _axis("rollout_batch_size", _halved(execution.rollout_batch_size, 1))
    if placement.num_engines or placement.vllm_users:
        share, ways = execution.vllm.gpu_memory_utilization, execution.vllm.tensor_parallel_size
        others = [other for other in _SHARES if other != share]
        yield _axis("vllm.gpu_memory_utilization", [(other, abs(other - share) / 0.05) for other in others])
        parallel = [other for other in _ways(placement) if other != ways]
        yield _axis("vllm.tensor_parallel_size", [(other, abs(math.log2(other / ways))) for other in parallel])


def _axis(name: str, others: Sequence[tuple[object, float]]) -> _Axis:
    """`others` are the other values of the setting, with the number of steps to each."""
    return [_Choice({}, 0.0), *(_choice(name, value, steps) for value, steps in others)]


def _choice(name: str, value: object, steps: float) -> _Choice:
    return _Choice({name: value}, _CHANGE + _PRICES[name] * steps)


def _more_sharded(execution: ExecutionConfig) -> _Axis:
    """Higher ZeRO stages, and the last one with the parameters in CPU memory."""
    stages = range(execution.zero_stage + 1, 4)
    axis = _axis("zero_stage", [(stage, stage - execution.zero_stage) for stage in stages])
    if execution.offload_parameters:
        return axis
    return [*axis, _joined((axis[-1], _choice("offload_parameters", True, 1)))]


def _more_ranks(placement: Placement) -> list[tuple[int, int]]:
    """Larger numbers of ranks on otherwise unused GPUs, each with the number of doublings."""
    execution, gpus = placement.config.execution, len(placement.training_here_gib or ())
    if placement.num_engines and execution.ray.placement == "disaggregated":
        gpus -= placement.num_engines * execution.vllm.tensor_parallel_size
    doubled = [(execution.ray.trainer_ranks << times, times) for times in range(1, _HALVINGS + 1)]
    return [(ranks, times) for ranks, times in doubled if ranks <= gpus]


def _halved(tokens: int, fewest: int) -> list[tuple[int, int]]:
    """`tokens` halved once, twice and so on, each with the number of halvings."""
    halved = [(tokens >> times, times) for times in range(1, _HALVINGS + 1)]
    return [(value, times) for value, times in halved if value >= fewest]


def _ways(placement: Placement) -> list[int]:
    most = len(placement.here_gib) if placement.here_gib else _MOST_WAYS
    return [ways for ways in range(1, most + 1) if placement.architecture and divides(ways, placement.architecture)]


def _with_counts(placement: Placement, changes: Changes) -> Changes:
    """`changes` with as many ranks and engines as the GPUs allow, possibly none.

    If the number of GPUs is unknown, it is taken to be the number that the experiment requires.
    """
    config, found = placement.config, dict(changes)
    ray, vllm = config.execution.ray, config.execution.vllm
    ways = changes.get("vllm.tensor_parallel_size", vllm.tensor_parallel_size)
    assert isinstance(ways, int)
    if placement.vllm_users:
        most = (len(placement.here_gib) if placement.here_gib else engine_gpus(config)) // ways
        if most < vllm.engines:
            found["vllm.engines"] = most
    if placement.trains_on_ray:
        gpus = len(placement.training_here_gib) if placement.training_here_gib else cluster_gpus(config)
        ranks, engines = changes.get("ray.trainer_ranks", ray.trainer_ranks), ray.engines
        assert isinstance(ranks, int)
        if ray.placement == "colocated":
            ranks = engines = min(ranks, gpus)
        elif placement.num_engines and ranks + engines * ways > gpus:
            engines = max(1, (gpus - ranks) // ways)
            ranks = min(ranks, gpus - engines * ways)
        else:
            ranks = min(ranks, gpus)
        counts = {"ray.trainer_ranks": (ranks, ray.trainer_ranks), "ray.engines": (engines, ray.engines)}
        found |= {name: number for name, (number, before) in counts.items() if number != before}
    return found


def _changed(config: ExperimentConfig, changes: Changes) -> ExperimentConfig | None:
    """The experiment with these changes; None where they contradict each other."""
    values = config.execution.model_dump()
    for name, value in changes.items():
        section, _, field = name.rpartition(".")
        (values[section] if section else values)[field] = value
    try:
        return config.model_copy(update={"execution": ExecutionConfig.model_validate(values)})
    except ValidationError:  # no rank or engine left, or engines that cannot share a GPU
        return None


def _as_yaml(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)

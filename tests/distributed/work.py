"""What the ranks of a process group do together; `ranks.on_ranks` starts one of these functions on every rank.

What a function returns on rank 0 is its result, as JSON. Its errors are relative L2 against float64 references.
"""

import copy
import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from reference import elastic_case, lora_case
from reference.gradient_case import (
    OPTIMIZER,
    PRESETS,
    execution,
    gradients_at_step,
    make_batch,
    moved,
    reference_step,
    relative_l2,
    shard_by_source,
    step_of,
    tiny_model,
    whole,
)
from reference.learner_case import moving_average, one_demonstration, two_updates
from reference.sft_case import sft
from reference.value_case import engine_steps, part_of, reference_steps
from torch import Tensor

from luffy.training import checkpoint
from luffy.training.checkpoint import CheckpointStore
from luffy.training.policy import Policy
from luffy.training.ranks import init_process_group
from luffy.types import TrainBatch

Settings = dict[str, Any]
GROUPS_OF_RANK = ((0, 1), (2, 3, 4))
OVER_THE_STEP = ("ppo", "reinforce_pp")
"""Presets whose advantages are normalised over all ranks, so that no rank may hold another's rows."""
PADDED: Settings = {"micro_batch_tokens": 70}
PACKED: Settings = {"micro_batch_tokens": 70, "packing": True}


def call(function: str, arguments: Sequence[Any]) -> Any:
    """What a function of this module returns, which a process group of all ranks runs."""
    init_process_group()
    result = globals()[function](*arguments)
    dist.destroy_process_group()
    return result


def several(orders: Sequence[tuple[str, Sequence[Any]]]) -> list[Any]:
    """What each of these functions returns, one after the other."""
    return [globals()[function](*arguments) for function, arguments in orders]


def steps(of_preset: Mapping[str, Sequence[Settings]], folder: str) -> dict[str, dict[str, float]]:
    """One step of each preset with each of its ZeRO settings and splits; `folder` is for an exported model.

    All settings of a preset are compared with one
    reference, which is computed once.
    """
    return {
        f"{json.dumps(settings)} {preset} {how} {layout}": _step(preset, how, {**settings, **layout}, Path(folder))
        for preset, each in of_preset.items()
        for settings in each
        for how, layout in _layouts_of(preset)
    }


def _layouts_of(preset: str) -> list[tuple[str, Settings]]:
    """One each, in turn (`luffy` has more): off-policy tokens on rank 0 alone, or whole groups on either rank."""
    if preset == "luffy":
        return [("by_source", PADDED), ("by_group", PACKED), ("by_source", {"micro_batch_tokens": 10_000})]
    if preset in OVER_THE_STEP or PRESETS.index(preset) % 2:
        return [("by_group", PACKED)]
    return [("by_source", PADDED)]


_model = functools.cache(tiny_model)


def _share(preset: str, how: str) -> TrainBatch:
    """This rank's rows."""
    if how == "by_group":
        return make_batch(preset, _model(), GROUPS_OF_RANK[dist.get_rank()])
    return shard_by_source(make_batch(preset, _model()), dist.get_rank())


def _step(preset: str, how: str, settings: Settings, folder: Path) -> dict[str, float]:
    """Of gradients, parameters and movement on this rank's share of the batch.

    On rank 0; the others have a part in the step alone.
    """
    start = dict(_model().named_parameters())
    policy = Policy(copy.deepcopy(_model()), OPTIMIZER, execution(**settings), "float32")
    policy.accumulate(_share(preset, how), step_of(preset))
    found = gradients_at_step(policy.engine, dict(policy.causal_lm.named_parameters()))
    policy.engine.step()
    after = _exported(policy, folder) if preset == "luffy" else whole(dict(policy.causal_lm.named_parameters()))
    if dist.get_rank() != 0:
        return {}
    gradients, parameters = reference_step(preset, _model())
    return {
        "gradient": relative_l2(found, gradients),
        "parameters": relative_l2(after, parameters),
        "movement": relative_l2(moved(after, start), moved(parameters, start)),
    }


def _exported(policy: Policy, folder: Path) -> dict[str, Tensor]:
    policy.export(folder)
    dist.barrier()
    found = {name: tensor.detach() for name, tensor in type(_model()).from_pretrained(folder).named_parameters()}
    dist.barrier()
    return found


# Uneven: the first rank has one row, and runs stand-ins where the other has more micro-batches.
CRITIC_SHARES = (slice(0, 1), slice(1, None))
CRITIC_LAYOUTS: tuple[Settings, ...] = (
    {"micro_batch_tokens": 10_000},
    {"micro_batch_tokens": 25},
    {"micro_batch_tokens": 25, "packing": True},
)


def critic(zero_stages: Sequence[int]) -> dict[str, dict[str, float]]:
    """The critic's two steps with each ZeRO stage and split: decoder and head apart, after the second step."""
    expected_gradients, expected_parameters = reference_steps(tiny_model(), value_clip=0.2)
    found = {}
    for zero_stage in zero_stages:
        for layout in CRITIC_LAYOUTS:
            settings = {"zero_stage": zero_stage, **layout}
            gradients, parameters, _ = engine_steps(tiny_model(), 0.2, CRITIC_SHARES[dist.get_rank()], settings)
            found[json.dumps(settings)] = {
                f"{part} {name}": relative_l2(part_of(found_one, part), part_of(wanted, part))
                for part in ("decoder.", "head.")
                for name, found_one, wanted in (
                    ("gradient", gradients, expected_gradients),
                    ("parameters", parameters, expected_parameters),
                )
            }
    return found


def learner(each: Sequence[tuple[Settings, Sequence[str]]]) -> list[dict[str, dict[str, float]]]:
    """With each of the settings, of its presets: the error of the movement, and the share of silent groups.

    Each rank has its shard of the same groups.
    """
    learned = []
    for settings, presets in each:
        where = {"num_ranks": dist.get_world_size(), "rank": dist.get_rank(), **settings}
        found = {preset: two_updates(preset, **where) for preset in presets}
        errors = {preset: error for preset, (error, _) in found.items()}
        silent = {preset: metrics["batch/zero_advantage_share"] for preset, (_, metrics) in found.items()}
        alone = {"one demonstration": one_demonstration(**where), "moving average": moving_average(**where)}
        learned.append({"errors": {**errors, **alone}, "silent": silent})
    return learned


def supervised(runs: Sequence[Settings]) -> list[list[dict[str, float]]]:
    """SFT: the metrics of each run's steps."""
    return [sft(**{**run, "model": Path(run["model"]), "out": Path(run["out"])}) for run in runs]


def adapter_steps(zero: Sequence[Settings], folder: str) -> dict[str, dict[str, float]]:
    """The step of a LoRA adapter: with the first ZeRO setting in three cases, with the others in one each, in turn."""
    cases: tuple[tuple[str, Settings], ...] = (
        ("luffy", {"micro_batch_tokens": 40}),
        ("luffy", {"micro_batch_tokens": 40, "packing": True}),
        ("sft", {"micro_batch_tokens": 10_000}),
    )
    return {
        f"{json.dumps(settings)} {case} {json.dumps(layout)}": lora_case.errors_of_step(
            case, Path(folder), **settings, **layout
        )
        for place, settings in enumerate(zero)
        for case, layout in (cases[place % 3 :][:1] if place else cases)
    }


def write(stages: Sequence[Sequence[Any]]) -> None:
    for stage, *layout in stages:
        elastic_case.write_and_go_on(Path(stage), *layout)


def resume(stages: Sequence[Sequence[Any]]) -> None:
    for stage, *layout in stages:
        elastic_case.resume_and_go_on(Path(stage), *layout)


def faults(stage: str) -> list[dict[str, str]]:
    """What each rank is told when the last rank cannot write, cannot read, or sees other checkpoints."""
    store, engines = CheckpointStore(Path(stage), keep=1), elastic_case.engines(elastic_case.trained(0, zero_stage=2))
    is_last = dist.get_rank() == dist.get_world_size() - 1
    store.save(engines, 1)
    told = {}
    for what in ("write_engine", "read_engine"):
        works = getattr(checkpoint, what)
        if is_last:
            setattr(checkpoint, what, _disk_full)
        try:
            store.save(engines, 2) if what == "write_engine" else store.load(engines, 1)
        except Exception as error:
            told[what] = f"{type(error).__name__}: {error}"
        setattr(checkpoint, what, works)
    try:
        store.load(engines, 5 if is_last else 1)
    except Exception as error:
        told["step"] = f"{type(error).__name__}: {error}"
    told["newest"] = str(store.newest())
    store.save(engines, 2)
    return _of_all(told)


def _disk_full(*_: object) -> None:
    raise OSError("no space left")


def _of_all(own: Any) -> list[Any]:
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, own)
    return found

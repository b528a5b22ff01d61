"""One step of presets on every rank of a process group, with each ZeRO setting and split; rank 0 prints the errors.

With `sequence_parallel: 2` both ranks share every sequence. All settings of a preset are compared with one reference,
which is computed once.

Run: torchrun --nproc-per-node 2 tests/distributed/gradient_worker.py '[{"zero_stage": 2}]' '["luffy"]' FOLDER
"""

import copy
import json
import sys
from pathlib import Path

import deepspeed
import torch.distributed as dist
from deepspeed.utils import safe_get_full_grad
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from reference.gradient_case import (
    OPTIMIZER,
    PRESETS,
    execution,
    make_batch,
    reference_step,
    relative_l2,
    shard_by_source,
    step_of,
    tiny_model,
)

from luffy.processes import exit_without_finalizing
from luffy.training.policy import Policy
from luffy.training.ranks import init_process_group, rank_mesh
from luffy.types import TrainBatch

MODEL = tiny_model()
GROUPS_OF_RANK = ((0, 1), (2, 3, 4))
OVER_THE_STEP = ("ppo", "reinforce_pp")
"""Presets whose advantages are normalised over all ranks, so that no rank may hold another's rows."""
PADDED: dict[str, object] = {"micro_batch_tokens": 70}
PACKED: dict[str, object] = {"micro_batch_tokens": 70, "packing": True}


def layouts_of(preset: str) -> list[tuple[str, dict[str, object]]]:
    """One each, in turn (`luffy` has more): off-policy tokens on rank 0 alone, or whole groups on either rank."""
    if preset == "luffy":
        return [("by_source", PADDED), ("by_group", PACKED), ("by_source", {"micro_batch_tokens": 10_000})]
    if preset in OVER_THE_STEP or PRESETS.index(preset) % 2:
        return [("by_group", PACKED)]
    return [("by_source", PADDED)]


def share(preset: str, how: str, slices: int) -> TrainBatch:
    """This rank's rows; all rows if it shares every sequence with the other rank."""
    if slices == 2:
        return make_batch(preset, MODEL, total=rank_mesh(slices).sum_over_shards)
    if how == "by_group":
        return make_batch(preset, MODEL, GROUPS_OF_RANK[dist.get_rank()])
    return shard_by_source(make_batch(preset, MODEL), dist.get_rank())


def capture_gradients(policy: Policy) -> dict[str, Tensor]:
    """Filled in by the next `engine.step()`, when gradients are reduced over ranks and not yet clipped."""
    gradients: dict[str, Tensor] = {}
    step = policy.engine.optimizer.step

    def read_then_step(*args: object, **kwargs: object) -> object:
        for name, parameter in policy.causal_lm.named_parameters():
            gradients[name] = safe_get_full_grad(parameter).clone()
        return step(*args, **kwargs)

    policy.engine.optimizer.step = read_then_step
    return gradients


def errors(preset: str, how: str, settings: dict[str, object]) -> dict[str, float]:
    """Relative L2 of gradients, parameters and movement of one step on this rank's share of the batch.

    On rank 0; the others have a part in the step alone.
    """
    start = {name: parameter.detach().double() for name, parameter in MODEL.named_parameters()}
    policy = Policy(copy.deepcopy(MODEL), OPTIMIZER, execution(**settings), "float32")
    policy.accumulate(share(preset, how, policy.mesh.slices), step_of(preset))
    found = capture_gradients(policy)
    policy.engine.step()
    moved = exported(policy) if preset == "luffy" else gathered(policy, settings["zero_stage"] == 3)
    if dist.get_rank() != 0:
        return {}
    gradients, parameters = reference_step(preset, MODEL)
    return {
        "gradient": relative_l2(found, gradients),
        "parameters": relative_l2(moved, parameters),
        "movement": relative_l2(
            {name: moved[name] - start[name] for name in start},
            {name: parameters[name] - start[name] for name in start},
        ),
    }


def gathered(policy: Policy, sharded: bool) -> dict[str, Tensor]:
    with deepspeed.zero.GatheredParameters(list(policy.causal_lm.parameters()), enabled=sharded):
        return {name: parameter.detach().double() for name, parameter in policy.causal_lm.named_parameters()}


def exported(policy: Policy) -> dict[str, Tensor]:
    folder = Path(sys.argv[3])
    policy.export(folder)
    dist.barrier()
    found = {name: tensor.double() for name, tensor in type(MODEL).from_pretrained(folder).named_parameters()}
    dist.barrier()
    return found


def main() -> None:
    """Print one JSON object: setting, preset and split -> errors."""
    init_process_group()
    zero, presets = json.loads(sys.argv[1]), json.loads(sys.argv[2])
    found = {
        f"{json.dumps(settings)} {preset} {how} {layout}": errors(preset, how, {**settings, **layout})
        for preset in presets
        for settings in zero
        for how, layout in layouts_of(preset)
    }
    if dist.get_rank() == 0:
        print("RESULT " + json.dumps(found))
    dist.destroy_process_group()
    exit_without_finalizing(0)


if __name__ == "__main__":
    main()

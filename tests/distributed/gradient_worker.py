"""One ZeRO setting on every rank of a process group, looping over presets and splits; rank 0 prints the errors.

Run: torchrun --nproc-per-node 2 tests/distributed/gradient_worker.py '{"zero_stage": 2}'
"""

import copy
import json
import sys
from pathlib import Path

import torch.distributed as dist
from deepspeed.utils import safe_get_full_grad
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from reference.gradient_case import (
    MAX_RESPONSE_TOKENS,
    OPTIMIZER,
    PRESETS,
    execution,
    make_batch,
    reference_step,
    relative_l2,
    shard,
    terms_of,
    tiny_model,
)

from luffy.training.distributed import init_process_group
from luffy.training.policy import Policy

LAYOUTS = ({"micro_batch_tokens": 10_000}, {"micro_batch_tokens": 40}, {"micro_batch_tokens": 40, "packing": True})


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


def errors(preset: str, settings: dict[str, object]) -> dict[str, float]:
    """Relative L2 of gradients, parameters and movement of one step on this rank's share of the batch."""
    model = tiny_model()
    batch = make_batch(preset, model)
    gradients, parameters = reference_step(preset, model)
    start = {name: parameter.detach().double() for name, parameter in model.named_parameters()}
    policy = Policy(copy.deepcopy(model), OPTIMIZER, execution(**settings), "float32")
    policy.accumulate(shard(batch, dist.get_rank(), dist.get_world_size()), terms_of(preset), MAX_RESPONSE_TOKENS)
    found = capture_gradients(policy)
    policy.engine.step()
    folder = Path(sys.argv[2]) / preset
    policy.export(folder)
    dist.barrier()
    moved = {name: tensor.double() for name, tensor in type(model).from_pretrained(folder).named_parameters()}
    dist.barrier()
    return {
        "gradient": relative_l2(found, gradients),
        "parameters": relative_l2(moved, parameters),
        "movement": relative_l2(
            {name: moved[name] - start[name] for name in start},
            {name: parameters[name] - start[name] for name in start},
        ),
    }


def main() -> None:
    """Print one JSON object: preset and split -> errors."""
    init_process_group()
    zero = json.loads(sys.argv[1])
    found = {f"{preset} {layout}": errors(preset, {**zero, **layout}) for preset in PRESETS for layout in LAYOUTS}
    if dist.get_rank() == 0:
        print("RESULT " + json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

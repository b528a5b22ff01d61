"""The critic's two steps on every rank of a process group, for each ZeRO stage; rank 0 prints the errors.

Run: torchrun --nproc-per-node 2 tests/distributed/critic_worker.py '[0, 2, 3]'
"""

import functools
import json
import sys
from pathlib import Path

import torch.distributed as dist
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from reference.gradient_case import relative_l2, tiny_model
from reference.value_case import engine_steps, part_of, reference_steps

from luffy.processes import exit_without_finalizing
from luffy.training.ranks import init_process_group

LAYOUTS = ({"micro_batch_tokens": 10_000}, {"micro_batch_tokens": 25}, {"micro_batch_tokens": 25, "packing": True})
# Uneven: the first rank has one row, and runs stand-ins where the other has more micro-batches.
SHARES = (slice(0, 1), slice(1, None))


@functools.cache
def expected() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The reference's gradients and parameters, which no setting changes."""
    return reference_steps(tiny_model(), value_clip=0.2)


def errors(settings: dict[str, object]) -> dict[str, float]:
    """Relative L2 of gradients and parameters after the second step, decoder and head apart."""
    expected_gradients, expected_parameters = expected()
    gradients, parameters, _ = engine_steps(tiny_model(), 0.2, SHARES[dist.get_rank()], settings)
    return {
        f"{part} {name}": relative_l2(part_of(found, part), part_of(wanted, part))
        for part in ("decoder.", "head.")
        for name, found, wanted in (
            ("gradient", gradients, expected_gradients),
            ("parameters", parameters, expected_parameters),
        )
    }


def main() -> None:
    """Print one JSON object: ZeRO stage and split -> errors."""
    init_process_group()
    found = {
        f"{zero_stage} {layout}": errors({"zero_stage": zero_stage, **layout})
        for zero_stage in json.loads(sys.argv[1])
        for layout in LAYOUTS
    }
    if dist.get_rank() == 0:
        print("RESULT " + json.dumps(found))
    dist.destroy_process_group()
    exit_without_finalizing(0)


if __name__ == "__main__":
    main()

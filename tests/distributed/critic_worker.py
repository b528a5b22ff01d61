"""The critic's two steps on every rank of a process group, for each ZeRO stage; rank 0 prints the errors.

Run: torchrun --nproc-per-node 2 tests/distributed/critic_worker.py '{"zero_stage": 2}'
"""

import json
import sys
from pathlib import Path

import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from reference.gradient_case import relative_l2, tiny_model
from reference.value_case import engine_steps, part_of, reference_steps

from luffy.processes import exit_without_finalizing
from luffy.training.distributed import init_process_group

LAYOUTS = ({"micro_batch_tokens": 10_000}, {"micro_batch_tokens": 25}, {"micro_batch_tokens": 25, "packing": True})
# Uneven: the first rank has one row, and runs stand-ins where the other has more micro-batches.
SHARES = (slice(0, 1), slice(1, None))


def errors(settings: dict[str, object]) -> dict[str, float]:
    """Relative L2 of gradients and parameters after the second step, decoder and head apart."""
    model = tiny_model()
    expected_gradients, expected_parameters = reference_steps(model, value_clip=0.2)
    gradients, parameters, _ = engine_steps(model, 0.2, SHARES[dist.get_rank()], settings)
    return {
        f"{part} {name}": relative_l2(part_of(found, part), part_of(expected, part))
        for part in ("decoder.", "head.")
        for name, found, expected in (
            ("gradient", gradients, expected_gradients),
            ("parameters", parameters, expected_parameters),
        )
    }


def main() -> None:
    """Print one JSON object: split -> errors."""
    init_process_group()
    zero = json.loads(sys.argv[1])
    found = {str(layout): errors({**zero, **layout}) for layout in LAYOUTS}
    if dist.get_rank() == 0:
        print("RESULT " + json.dumps(found))
    dist.destroy_process_group()
    exit_without_finalizing(0)


if __name__ == "__main__":
    main()

r"""A LoRA adapter on every rank of a process group: its step against the float64 reference, and its checkpoints.

Run: torchrun --nproc-per-node 2 tests/distributed/lora_worker.py \
  '{"steps": [{"zero_stage": 2}], "write": [], "resume": []}' FOLDER
"""

import json
import sys
from pathlib import Path

import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from reference.lora_case import errors_of_step, resume_and_go_on, write_and_go_on

from luffy.processes import exit_without_finalizing
from luffy.training.ranks import init_process_group

LAYOUTS: tuple[tuple[str, dict[str, object]], ...] = (
    ("luffy", {"micro_batch_tokens": 40}),
    ("luffy", {"micro_batch_tokens": 40, "packing": True}),
    ("sft", {"micro_batch_tokens": 10_000}),
)


def main() -> None:
    """Print one JSON object: setting, case and layout -> errors."""
    init_process_group()
    work, folder = json.loads(sys.argv[1]), Path(sys.argv[2])
    found = {
        f"{json.dumps(zero)} {case} {json.dumps(layout)}": errors_of_step(case, folder, **zero, **layout)
        for zero in work["steps"]
        for case, layout in LAYOUTS
    }
    for stage, zero_stage in work["write"]:
        write_and_go_on(Path(stage), zero_stage)
    for stage, zero_stage in work["resume"]:
        resume_and_go_on(Path(stage), zero_stage)
    if dist.get_rank() == 0:
        print("RESULT " + json.dumps(found))
    dist.destroy_process_group()
    exit_without_finalizing(0)


if __name__ == "__main__":
    main()

"""The learner on every rank of a process group, each with its shard of the same groups; rank 0 prints the errors.

Run: torchrun --nproc-per-node 2 tests/distributed/learner_worker.py '[{"zero_stage": 2}, {"zero_stage": 3}]'
"""

import json
import sys
from pathlib import Path

import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from reference.learner_case import METHODS, moving_average, one_demonstration, two_updates

from luffy.processes import exit_without_finalizing
from luffy.training.ranks import init_process_group


def learned(settings: dict[str, object]) -> dict[str, dict[str, float]]:
    """Of each preset: the error of the movement, and the share of silent groups."""
    where = {"num_ranks": dist.get_world_size(), "rank": dist.get_rank(), **settings}
    found = {preset: two_updates(preset, **where) for preset in METHODS}
    errors = {preset: error for preset, (error, _) in found.items()}
    silent = {preset: metrics["batch/zero_advantage_share"] for preset, (_, metrics) in found.items()}
    alone = {"one demonstration": one_demonstration(**where), "moving average": moving_average(**where)}
    return {"errors": {**errors, **alone}, "silent": silent}


def main() -> None:
    """Print one JSON list: what is learned with each of the settings."""
    init_process_group()
    found = [learned(settings) for settings in json.loads(sys.argv[1])]
    if dist.get_rank() == 0:
        print("RESULT " + json.dumps(found))
    dist.destroy_process_group()
    exit_without_finalizing(0)


if __name__ == "__main__":
    main()

r"""SFT on all ranks of a process group; rank 0 prints the metrics of every step.

Run: torchrun --nproc-per-node 2 tests/distributed/sft_worker.py '[{"model": "DIR", "out": "DIR", "zero_stage": 2}]'
"""

import json
import sys
from pathlib import Path

import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from reference.sft_case import sft

from luffy.processes import exit_without_finalizing
from luffy.training.ranks import init_process_group


def main() -> None:
    """Print one JSON list: the metrics of each run's steps."""
    init_process_group()
    runs = [{**run, "model": Path(run["model"]), "out": Path(run["out"])} for run in json.loads(sys.argv[1])]
    histories = [sft(**run) for run in runs]
    if dist.get_rank() == 0:
        print("RESULT " + json.dumps(histories))
    dist.destroy_process_group()
    exit_without_finalizing(0)


if __name__ == "__main__":
    main()

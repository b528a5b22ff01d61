r"""Checkpoints written or resumed by all ranks of a process group, for other ranks to resume or to have written.

Run: torchrun --nproc-per-node 2 tests/distributed/elastic_worker.py \
  '{"write": [["DIR", 2, "float32"]], "resume": [], "fail": null}'
"""

import json
import sys
from pathlib import Path

import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from reference.elastic_case import engines, resume_and_go_on, trained, write_and_go_on

from luffy.processes import exit_without_finalizing
from luffy.training import checkpoint
from luffy.training.checkpoint import CheckpointStore
from luffy.training.ranks import init_process_group


def faults(stage: Path) -> dict[str, str]:
    """What this rank is told when the last rank cannot write, cannot read, or sees other checkpoints."""
    store, trained_here = CheckpointStore(stage, keep=1), engines(trained(0, zero_stage=2))
    is_last = dist.get_rank() == dist.get_world_size() - 1
    store.save(trained_here, 1)
    told = {}
    for what in ("write_engine", "read_engine"):
        works = getattr(checkpoint, what)
        if is_last:
            setattr(checkpoint, what, _disk_full)
        try:
            store.save(trained_here, 2) if what == "write_engine" else store.load(trained_here, 1)
        except Exception as error:
            told[what] = f"{type(error).__name__}: {error}"
        setattr(checkpoint, what, works)
    try:
        store.load(trained_here, 5 if is_last else 1)
    except Exception as error:
        told["step"] = f"{type(error).__name__}: {error}"
    told["newest"] = str(store.newest())
    store.save(trained_here, 2)
    return told


def _disk_full(*_: object) -> None:
    raise OSError("no space left")


def main() -> None:
    """Print one JSON object: what each rank was told."""
    init_process_group()
    work = json.loads(sys.argv[1])
    for stage, zero_stage, dtype in work["write"]:
        write_and_go_on(Path(stage), zero_stage, dtype)
    for stage, zero_stage, dtype in work["resume"]:
        resume_and_go_on(Path(stage), zero_stage, dtype)
    told: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(told, faults(Path(work["fail"])) if work["fail"] else None)
    if dist.get_rank() == 0:
        print("RESULT " + json.dumps(told))
    dist.destroy_process_group()
    exit_without_finalizing(0)


if __name__ == "__main__":
    main()

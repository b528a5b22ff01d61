"""The process group of a training stage: from `torchrun`'s environment, or a group of one."""

import os
from datetime import timedelta

import deepspeed
import torch
import torch.distributed as dist
from torch import Tensor

TIMEOUT = timedelta(minutes=10)
"""How long a rank waits in a collective call for one that hangs."""


def init_process_group() -> None:
    """Join the process group once; `gloo` on CPU, `nccl` on GPUs. A single process opens no port.

    A process that has joined should exit through `exit_without_finalizing`.
    """
    if dist.is_initialized():
        return
    # A launcher sets MASTER_ADDR. RANK alone may be inherited from a parent process that set it below.
    if "MASTER_ADDR" in os.environ:
        dist.init_process_group(_backend(), timeout=TIMEOUT)
        return
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
    dist.init_process_group(_backend(), store=dist.HashStore(), rank=0, world_size=1, timeout=TIMEOUT)


def join_process_group(host: str, port: int, listening: int | None) -> None:
    """Join the group of RANK and WORLD_SIZE at `host`; `listening` is the socket (its descriptor) of rank 0 there."""
    rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.TCPStore(host, port, num_ranks, rank == 0, TIMEOUT, master_listen_fd=listening)
    dist.init_process_group(_backend(), store=store, rank=rank, world_size=num_ranks, timeout=TIMEOUT)


def _backend() -> str:
    return "nccl" if torch.cuda.is_available() else "gloo"


def init_deepspeed_comm() -> None:
    """Let DeepSpeed communicate through torch's process group, which has to exist."""
    if not torch.cuda.is_available():
        # Its shared-memory all-reduce would be compiled: C++, a minute, and a stale lock when killed.
        deepspeed.ops.__dict__["__compatible_ops__"] = {"deepspeed_shm_comm": False}
    deepspeed.comm.init_distributed(dist_init_required=False)


def device() -> torch.device:
    """This rank's device."""
    if torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device("cpu")


def sum_over_ranks(tensor: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """The sum of `tensor` over the ranks of `group`, on its own device; None: over all ranks."""
    if dist.get_world_size(group) == 1:
        return tensor
    total = tensor.to(device())
    dist.all_reduce(total, group=group)
    return total.to(tensor.device)


def max_over_ranks(value: int) -> int:
    """The largest `value` of any rank."""
    if dist.get_world_size() == 1:
        return value
    largest = torch.tensor(value, device=device())
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return int(largest)

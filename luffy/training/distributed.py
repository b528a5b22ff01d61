"""The process group of a training stage: from `torchrun`'s environment, or a group of one."""

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

_TIMEOUT = timedelta(minutes=10)


def init_process_group() -> None:
    """Join the process group once; `gloo` on CPU, `nccl` on GPUs. A single process opens no port.

    A process that has joined should exit through `exit_without_finalizing`.
    """
    if dist.is_initialized():
        return
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    # A launcher sets MASTER_ADDR. RANK alone may be inherited from a parent process that set it below.
    if "MASTER_ADDR" in os.environ:
        dist.init_process_group(backend, timeout=_TIMEOUT)
        return
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=_TIMEOUT)


def device() -> torch.device:
    """This rank's device."""
    if torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device("cpu")


def sum_over_ranks(tensor: Tensor) -> Tensor:
    """The sum of `tensor` over all ranks, on its own device."""
    if dist.get_world_size() == 1:
        return tensor
    total = tensor.to(device())
    dist.all_reduce(total)
    return total.to(tensor.device)


def max_over_ranks(value: int) -> int:
    """The largest `value` of any rank."""
    if dist.get_world_size() == 1:
        return value
    largest = torch.tensor(value, device=device())
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return int(largest)

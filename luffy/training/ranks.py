"""The ranks of a training stage: their process group, and calls on all of them.

The process group comes from `torchrun`'s environment, or is a group of one. For their driver, `Ranks` is one method
that is called on all of them at once. Ranks hold collectives, so every rank has to receive the same calls in the same
order. They live in this process (`LocalRanks`) or in Ray actors (`luffy.cluster.ray_engine`).
"""

import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Generic, Protocol, TypeVar, TypeVarTuple

import torch
import torch.distributed as dist
from torch import Tensor

from luffy.config.execution import CUBLAS_WORKSPACE, ExecutionConfig

TIMEOUT = timedelta(minutes=10)
"""How long a rank waits in a collective call for one that hangs."""


def take_deterministic_kernels() -> None:
    """Have torch take no other in this process; RuntimeError at an operation that has none."""
    os.environ.update(CUBLAS_WORKSPACE)
    torch.use_deterministic_algorithms(True)
    # New memory full of NaN, which finds reads of it, would be the KV cache of a vLLM in this process.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


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
    import deepspeed  # not above: slow, and a driver of ranks in other processes needs none

    if not torch.cuda.is_available():
        # Its shared-memory all-reduce would be compiled: C++, a minute, and a stale lock when killed.
        deepspeed.ops.__dict__["__compatible_ops__"] = {"deepspeed_shm_comm": False}
    deepspeed.comm.init_distributed(dist_init_required=False)


def device() -> torch.device:
    """This rank's device."""
    if torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device("cpu")


def to_device(tensor: Tensor) -> Tensor:
    """`tensor` on this rank's device; from pinned memory, so that nothing waits until a GPU has it."""
    where = device()
    return tensor.pin_memory().to(where, non_blocking=True) if where.type == "cuda" else tensor.to(where)


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


Rank = TypeVar("Rank")
_Rank_co = TypeVar("_Rank_co", covariant=True)
_Arguments = TypeVarTuple("_Arguments")
Result = TypeVar("Result")


class RankSpec(Protocol[_Rank_co]):
    """Everything a rank is built from; it is sent to other processes and machines."""

    @property
    def execution(self) -> ExecutionConfig: ...

    @property
    def out(self) -> Path:
        """The stage's directory, on a file system shared by all ranks."""

    def open_rank(self) -> _Rank_co:
        """Build the rank in this process, which has joined the process group; a collective call."""


class Ranks(Protocol[_Rank_co]):
    """All ranks of a process group."""

    @property
    def num_ranks(self) -> int: ...

    @property
    def num_gpus(self) -> int:
        """Number of GPUs that the ranks hold, including those of their engines."""

    def call(
        self, method: Callable[[_Rank_co, *_Arguments], Result], arguments: Sequence[tuple[*_Arguments]]
    ) -> list[Result]:
        """Call `method` on every rank at once; `arguments` and the results are in order of rank."""


def call_everywhere(
    ranks: Ranks[Rank], method: Callable[[Rank, *_Arguments], Result], *arguments: *_Arguments
) -> Result:
    """Call `method` with the same arguments on every rank; returns the result of rank 0."""
    return ranks.call(method, [arguments] * ranks.num_ranks)[0]


class LocalRanks(Generic[Rank]):
    """A single rank in this process."""

    num_ranks = 1

    def __init__(self, rank: Rank) -> None:
        self._rank = rank

    @property
    def num_gpus(self) -> int:
        return int(torch.cuda.is_available())

    def call(
        self, method: Callable[[Rank, *_Arguments], Result], arguments: Sequence[tuple[*_Arguments]]
    ) -> list[Result]:
        return [method(self._rank, *arguments[0])]

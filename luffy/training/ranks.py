"""The ranks of a training stage: their process group, their mesh of shards and slices, and calls on all of them.

The process group comes from `torchrun`'s environment, or is a group of one. The mesh says which ranks hold the same
rows, and which tokens each computes. With `execution.sequence_parallel: N`, N consecutive ranks hold the same shard of
the rows. Every micro-batch is cut into N slices of equal width, and a rank runs the model's layers on one of them.
Attention exchanges slices for heads (`luffy.training.attention`), and the scores of all slices are joined before the
loss.

So every rank of a shard computes the same losses, denominators and metrics from whole rows, and they are summed over
shards, not over ranks. Its gradient is that of the shard's loss through the scores of its own slice. The gradient of
the step is therefore the sum over all ranks, as it is without slices.

For their driver, `Ranks` is one method that is called on all of them at once. Ranks hold collectives, so every rank has
to receive the same calls in the same order. They live in this process (`LocalRanks`) or in Ray actors
(`luffy.cluster.ray_engine`).

Shape legend: `B` rows, `T` tokens.
"""

import functools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Generic, Protocol, TypeVar, TypeVarTuple

import torch
import torch.distributed as dist
from torch import Tensor

from luffy.config.execution import ExecutionConfig

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


@dataclass(frozen=True, slots=True)
class RankMesh:
    """The place of this rank in the mesh."""

    slices: int = 1
    """Ranks that share each sequence."""
    same_shard: dist.ProcessGroup | None = None
    """Ranks that hold the same rows, in the order of their slices; None: this rank alone."""
    same_slice: dist.ProcessGroup | None = None
    """Ranks that have the same slice, one for each shard; None: all ranks."""

    def own_slice(self, tensor: Tensor) -> Tensor:
        """This rank's slice of `(..., T)`; the number of slices has to divide T."""
        if self.slices == 1:
            return tensor
        return tensor.chunk(self.slices, dim=-1)[dist.get_rank(self.same_shard)]

    def join(self, own: Tensor) -> Tensor:
        """`(..., T)` from the slices of all ranks that share the rows; the inverse of `own_slice`, differentiable.

        The gradient of a slice is that of this rank's loss alone, which has to be the same on all of these ranks.
        """
        if self.slices == 1:
            return own
        joined: Tensor = _Join.apply(own, self)
        return joined

    def sum_over_shards(self, tensor: Tensor) -> Tensor:
        """The sum of `tensor` over all shards, on its own device; equal on the ranks of a shard before and after."""
        return sum_over_ranks(tensor, self.same_slice)


WHOLE_SEQUENCES = RankMesh()
"""Every rank has rows of its own, and computes all of their tokens."""


@functools.cache
def rank_mesh(slices: int) -> RankMesh:
    """The mesh of all ranks in which `slices` of them share each sequence.

    The first call with `slices` above 1 is collective; the process group has to exist.
    """
    if slices == 1:
        return WHOLE_SEQUENCES
    num_ranks = dist.get_world_size()
    assert num_ranks % slices == 0, "ExecutionConfig has checked the number of ranks"
    init_deepspeed_comm()
    shards = [list(range(first, first + slices)) for first in range(0, num_ranks, slices)]
    return RankMesh(slices, _own_group(shards), _own_group([list(column) for column in zip(*shards, strict=True)]))


def _own_group(groups: Sequence[list[int]]) -> dist.ProcessGroup:
    own, _ = dist.new_subgroups_by_enumeration(groups, timeout=TIMEOUT)
    return own


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, own: Tensor, mesh: RankMesh) -> Tensor:
        ctx.mesh = mesh  # type: ignore[attr-defined]
        parts = [torch.empty_like(own, memory_format=torch.contiguous_format) for _ in range(mesh.slices)]
        dist.all_gather(parts, own.contiguous(), group=mesh.same_shard)
        return torch.cat(parts, dim=-1)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *gradients: Tensor) -> tuple[Tensor, None]:
        # No sum over ranks: each of them has computed the same loss, which counts once.
        return ctx.mesh.own_slice(gradients[0]), None  # type: ignore[attr-defined]


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


class ShardRanks(Generic[Rank]):
    """Presents each `slices` consecutive ranks, which share their sequences (`luffy.training.ranks`), as one."""

    def __init__(self, ranks: Ranks[Rank], slices: int) -> None:
        self._ranks = ranks
        self._slices = slices

    @property
    def num_ranks(self) -> int:
        return self._ranks.num_ranks // self._slices

    @property
    def num_gpus(self) -> int:
        return self._ranks.num_gpus

    def call(
        self, method: Callable[[Rank, *_Arguments], Result], arguments: Sequence[tuple[*_Arguments]]
    ) -> list[Result]:
        """Call `method` on every rank with the arguments of its shard; one result for each shard."""
        repeated = [of_shard for of_shard in arguments for _ in range(self._slices)]
        return self._ranks.call(method, repeated)[:: self._slices]


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

"""The ranks of training as a mesh of shards and slices: which ranks hold the same rows, and which tokens each computes.

With `execution.sequence_parallel: N`, N consecutive ranks hold the same shard of the rows. Every micro-batch is cut
into N slices of equal width, and a rank runs the model's layers on one of them. Attention exchanges slices for heads
(`luffy.training.ulysses`), and the scores of all slices are joined before the loss.

So every rank of a shard computes the same losses, denominators and metrics from whole rows, and they are summed over
shards, not over ranks. Its gradient is that of the shard's loss through the scores of its own slice. The gradient of
the step is therefore the sum over all ranks, as it is without slices.

Shape legend: `B` rows, `T` tokens.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from luffy.training.distributed import TIMEOUT, init_deepspeed_comm, sum_over_ranks


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

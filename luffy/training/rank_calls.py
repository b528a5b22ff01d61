"""The ranks of a training process group as their driver sees them: one method, called on all of them at once.

Ranks hold collectives, so every rank has to receive the same calls in the same order. They live in this process
(`LocalRanks`) or in Ray actors (`luffy.cluster.ray_ranks`).
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, Protocol, TypeVar, TypeVarTuple

import torch

from luffy.config.execution import ExecutionConfig

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
        ...

    def open_rank(self) -> _Rank_co:
        """Build the rank in this process, which has joined the process group; a collective call."""
        ...


class Ranks(Protocol[_Rank_co]):
    """All ranks of a process group."""

    @property
    def num_ranks(self) -> int: ...

    @property
    def num_gpus(self) -> int:
        """Number of GPUs that the ranks hold, including those of their engines."""
        ...

    def call(
        self, method: Callable[[_Rank_co, *_Arguments], Result], arguments: Sequence[tuple[*_Arguments]]
    ) -> list[Result]:
        """Call `method` on every rank at once; `arguments` and the results are in order of rank."""
        ...


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
        """Number of shards."""
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
        """Call `method` on the rank."""
        return [method(self._rank, *arguments[0])]

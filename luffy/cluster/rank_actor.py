"""The Ray actor of a trainer rank, and the setup of an actor's process.

Each process imports this module before `ProcessSetup.apply`, so nothing heavy (torch) is imported at the top.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, TypeVarTuple

import ray

from luffy.pipeline.inherited_environment import drop_foreign

if TYPE_CHECKING:
    from luffy.training.rank_calls import Rank, RankSpec

_Arguments = TypeVarTuple("_Arguments")
_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class ProcessSetup:
    """Log file, environment and thread count, applied before anything else in an actor's process."""

    log: Path
    """File that receives stdout and stderr; its last lines are shown when the process dies."""
    num_threads: int | None

    def apply(self) -> None:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        sink = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        sys.stdout.flush()
        sys.stderr.flush()
        os.dup2(sink, 1)
        os.dup2(sink, 2)
        drop_foreign(os.environ)  # of whoever has started the cluster
        if self.num_threads is not None:
            import torch

            os.environ["OMP_NUM_THREADS"] = str(self.num_threads)
            torch.set_num_threads(self.num_threads)


class RankActor:
    """One rank of the trainer."""

    def __init__(self, setup: ProcessSetup) -> None:
        setup.apply()

    def pid(self) -> int:
        """Process id of the actor."""
        return os.getpid()

    def meeting_point(self) -> tuple[str, int]:
        """Address and port where this rank, which has to be rank 0, listens for the others."""
        address = ray.util.get_node_ip_address()
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        # Kept from now on: until torch is loaded, which takes seconds, another process could take a free port.
        self._listening = socket.create_server(("", 0), family=family)
        return address, self._listening.getsockname()[1]

    def open(self, spec: RankSpec[object], rank: int, num_ranks: int, meeting_point: tuple[str, int]) -> None:
        """Join the process group and load the model; a collective call."""
        # Ray makes a single GPU visible to each process, so the local rank is always 0.
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(num_ranks), "LOCAL_RANK": "0"}
        from luffy.training.ranks import join_process_group

        join_process_group(*meeting_point, self._listening.detach() if rank == 0 else None)
        self._rank: Any = spec.open_rank()

    def call(self, method: Callable[[Rank, *_Arguments], _Result], *arguments: *_Arguments) -> _Result:
        """The result of a method of this actor's rank."""
        return method(self._rank, *arguments)

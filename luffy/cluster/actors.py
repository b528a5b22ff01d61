"""The Ray actors: a trainer rank and a vLLM engine.

Each process imports this module before `ProcessSetup.apply`, so nothing heavy (torch, DeepSpeed, vLLM) is imported at
the top.
"""

from __future__ import annotations

import os
import queue
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, TypeVarTuple

import ray

if TYPE_CHECKING:
    from torch import Tensor

    from luffy.config.execution import VLLMConfig
    from luffy.rollout.engine import Completion, RolloutRequest, SamplingParams
    from luffy.training.rank_calls import Rank, RankSpec

    Bucket = list[tuple[str, Tensor]]

_Arguments = TypeVarTuple("_Arguments")
_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class ProcessSetup:
    """Log file and thread count, applied before anything else in an actor's process."""

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
        """Address of this machine and a free port on it, for the process group's rendezvous."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return ray.util.get_node_ip_address(), probe.getsockname()[1]

    def open(self, spec: RankSpec[object], rank: int, num_ranks: int, meeting_point: tuple[str, int]) -> None:
        """Join the process group and load the model; a collective call."""
        address, port = meeting_point
        # Ray makes a single GPU visible to each process, so the local rank is always 0.
        os.environ |= {"MASTER_ADDR": address, "MASTER_PORT": str(port), "LOCAL_RANK": "0"}
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(num_ranks)}
        from luffy.training.distributed import init_process_group

        init_process_group()
        self._rank: Any = spec.open_rank()

    def call(self, method: Callable[[Rank, *_Arguments], _Result], *arguments: *_Arguments) -> _Result:
        """The result of a method of this actor's rank."""
        return method(self._rank, *arguments)


class EngineActor:
    """One vLLM engine. Its methods run in several threads: generation continues while weights arrive."""

    def __init__(self, setup: ProcessSetup) -> None:
        setup.apply()
        self._incoming: queue.Queue[Bucket | None] = queue.Queue(maxsize=1)
        self._timeout_s = 0.0

    def pid(self) -> int:
        """Process id of the actor."""
        return os.getpid()

    def open(
        self, model: Path, config: VLLMConfig, dtype: str, max_model_len: int, timeout_s: float, sleeps: bool
    ) -> None:
        """Load the model folder; `sleeps` enables vLLM's sleep mode, for a GPU shared with a trainer rank."""
        from luffy.rollout.vllm_engine import VLLMEngine

        self._timeout_s = timeout_s
        self._engine = VLLMEngine.from_folder(
            model, config, dtype, max_model_len=max_model_len, wait_timeout_s=timeout_s, sleep_mode=sleeps
        )

    def generate(self, requests: Sequence[RolloutRequest], params: SamplingParams) -> list[Completion]:
        """One completion a request, in the order of the requests."""
        return self._engine.generate(requests, params)

    def sleep(self) -> None:
        """Release the GPU memory, weights included; new weights must be loaded before the next `generate`."""
        self._engine.sleep(level=2)

    def wake_up(self, part: str) -> None:
        """Allocate a part of the memory again: first `weights`, then, once they are loaded, `kv_cache`."""
        self._engine.wake_up([part])

    def load_weights(self, version: int) -> None:
        """Load all weights from the buckets passed to `receive`, up to the final None."""
        self._engine.load_weights(self._buckets(), version)

    def receive(self, bucket: Bucket | None) -> None:
        """Queue one bucket of weights; blocks while another is queued, so at most two are in memory."""
        self._incoming.put(bucket, timeout=self._timeout_s)

    def _buckets(self) -> Iterator[tuple[str, Tensor]]:
        while (bucket := self._incoming.get(timeout=self._timeout_s)) is not None:
            yield from bucket

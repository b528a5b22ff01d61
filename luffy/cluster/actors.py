"""What runs inside Ray's processes: a trainer rank, an engine.

Loaded by a process before it has set itself up, so nothing here imports torch, DeepSpeed or vLLM at the top.
"""

from __future__ import annotations

import os
import queue
import socket
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

if TYPE_CHECKING:
    from ray.actor import ActorHandle
    from torch import Tensor

    from luffy.config.execution import VLLMConfig
    from luffy.rollout.engine import Completion, RolloutRequest, SamplingParams
    from luffy.training.trainer import TrainerSpec

    Bucket = list[tuple[str, Tensor]]


@dataclass(frozen=True, slots=True)
class ProcessSetup:
    """What every process does first."""

    log: Path
    """Where it writes instead of to Ray's own files; the stage shows its end when the process dies."""
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
        """Of this process."""
        return os.getpid()

    def meeting_point(self) -> tuple[str, int]:
        """Address and a free port of this machine, for the ranks to meet."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return ray.util.get_node_ip_address(), probe.getsockname()[1]

    def open(self, spec: TrainerSpec, rank: int, num_ranks: int, meeting_point: tuple[str, int]) -> None:
        """Join the others and load the model; all ranks together."""
        address, port = meeting_point
        # Ray shows a process its own GPU alone, so that it is the first one on every rank.
        os.environ |= {"MASTER_ADDR": address, "MASTER_PORT": str(port), "LOCAL_RANK": "0"}
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(num_ranks)}
        from luffy.training.distributed import init_process_group
        from luffy.training.trainer import TrainerRank

        init_process_group()
        self._rank = TrainerRank(spec)

    def call(self, method: str, *arguments: object) -> Any:
        """What the rank's method of that name says."""
        return getattr(self._rank, method)(*arguments)

    def send_weights(self, engines: Sequence[ActorHandle], version: int, timeout_s: float) -> list[int]:
        """Give the engines the present weights; all ranks together. Returns the places of those that did not take them.

        The weights are at least those of `version`: RL steps that learn nothing do not come to the ranks.
        Whatever becomes of the engines, every rank goes through all parameters: one that stopped would leave the
        others waiting for it.
        """
        from luffy.cluster.weights import WeightSender

        weights = self._rank.policy.weights()
        if self._rank.policy.engine.global_rank != 0:
            for _ in weights:
                pass
            return []
        return WeightSender(engines, timeout_s).send(weights, max(version, self._rank.version))

    def free_cache(self) -> None:
        """Leave what torch keeps of the GPU's memory to whoever shares it."""
        import torch

        torch.cuda.empty_cache()


class EngineActor:
    """One vLLM engine. Its methods run in several threads: rollouts go on while weights arrive."""

    def __init__(self, setup: ProcessSetup) -> None:
        setup.apply()
        self._incoming: queue.Queue[Bucket | None] = queue.Queue(maxsize=1)
        self._timeout_s = 0.0

    def pid(self) -> int:
        """Of this process."""
        return os.getpid()

    def open(
        self, model: Path, config: VLLMConfig, dtype: str, max_model_len: int, timeout_s: float, sleeps: bool
    ) -> None:
        """Load the model folder; `sleeps`: it will give its GPU up in between."""
        from luffy.rollout.vllm_engine import VLLMEngine

        self._timeout_s = timeout_s
        self._engine = VLLMEngine.from_folder(
            model, config, dtype, max_model_len=max_model_len, wait_timeout_s=timeout_s, sleep_mode=sleeps
        )

    def generate(self, requests: Sequence[RolloutRequest], params: SamplingParams) -> list[Completion]:
        """One completion a request, in the order of the requests."""
        return self._engine.generate(requests, params)

    def sleep(self) -> None:
        """Give up the GPU's memory, weights and all: new ones come before it generates again."""
        self._engine.sleep(level=2)

    def wake_up(self, part: str) -> None:
        """Take a part of the memory back: first `weights`, to be filled, then `kv_cache`."""
        self._engine.wake_up([part])

    def load_weights(self, version: int) -> None:
        """Take all weights from the buckets that `receive` is given, up to the closing None."""
        self._engine.load_weights(self._buckets(), version)

    def receive(self, bucket: Bucket | None) -> None:
        """Take a part of the weights; returns once it is its turn, so that at most two parts are held."""
        self._incoming.put(bucket, timeout=self._timeout_s)

    def _buckets(self) -> Iterator[tuple[str, Tensor]]:
        while (bucket := self._incoming.get(timeout=self._timeout_s)) is not None:
            yield from bucket

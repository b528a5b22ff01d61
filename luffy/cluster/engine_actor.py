"""The Ray actor of a vLLM engine.

Each process imports this module before `ProcessSetup.apply`, so nothing heavy (torch, vLLM) is imported at the top.
"""

from __future__ import annotations

import os
import queue
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from luffy.cluster.rank_actor import ProcessSetup

if TYPE_CHECKING:
    from torch import Tensor

    from luffy.broadcast_group import Invitation, TensorSpec
    from luffy.config.execution import VLLMConfig
    from luffy.rollout.engine import Completion, RolloutRequest, SamplingParams
    from luffy.rollout.vllm_update import WeightUpdate


@dataclass(frozen=True, slots=True)
class _Bucket:
    """Weights received through the object store."""

    weights: list[tuple[str, Tensor]]

    def load(self, update: WeightUpdate) -> None:
        for name, tensor in self.weights:
            update.load(name, tensor)


@dataclass(frozen=True, slots=True)
class _Broadcast:
    """Weights that rank 0 is about to send to the workers."""

    specs: Sequence[TensorSpec]
    failure: Future[str | None] = field(default_factory=Future)
    """None once the weights are received, else the reason why not."""

    def load(self, update: WeightUpdate) -> None:
        failure = update.receive(self.specs)
        self.failure.set_result(failure)  # before the weights are loaded, so that rank 0 prepares the next meanwhile
        if failure is None:
            update.load_received()


class EngineActor:
    """One vLLM engine. Its methods run in several threads: generation continues while weights arrive."""

    def __init__(self, setup: ProcessSetup) -> None:
        setup.apply()
        self._incoming: queue.Queue[_Bucket | _Broadcast | None] = queue.Queue(maxsize=1)
        self._timeout_s = 0.0

    def pid(self) -> int:
        """Process id of the actor."""
        return os.getpid()

    def open(
        self,
        model: Path,
        config: VLLMConfig,
        dtype: str,
        max_model_len: int,
        timeout_s: float,
        *,
        sleeps: bool = False,
        reads_text: bool = False,
    ) -> None:
        """Load the model folder.

        `sleeps` enables vLLM's sleep mode, for a GPU shared with a trainer rank; `reads_text` enables stop texts.
        """
        from luffy.rollout.vllm_engine import VLLMEngine

        self._timeout_s = timeout_s
        self._engine = VLLMEngine.from_folder(
            model,
            config,
            dtype,
            max_model_len=max_model_len,
            wait_timeout_s=timeout_s,
            sleep_mode=sleeps,
            reads_text=reads_text,
        )

    def generate(self, requests: Sequence[RolloutRequest], params: SamplingParams) -> list[Completion]:
        """One completion per request, in order."""
        return self._engine.generate(requests, params)

    def sleep(self) -> None:
        """Release the GPU memory, weights included; new weights must be loaded before the next `generate`."""
        self._engine.sleep(level=2)

    def wake_up(self, part: str) -> None:
        """Allocate a part of the memory again: first `weights`, then, once they are loaded, `kv_cache`."""
        self._engine.wake_up([part])

    def load_weights(self, version: int) -> None:
        """Load all weights from the buckets that `receive` and `receive_broadcast` announce, up to the final None."""
        with self._engine.weight_update(version) as update:
            for part in self._parts():
                part.load(update)

    def load_weights_from(self, folder: Path, version: int) -> None:
        """Load all weights from a model folder."""
        self._engine.load_weights_from(folder, version)

    def receive(self, bucket: list[tuple[str, Tensor]] | None) -> None:
        """Queue one bucket of weights; blocks while another is queued, so at most two are in memory."""
        self._incoming.put(None if bucket is None else _Bucket(bucket), timeout=self._timeout_s)

    def join_broadcasts(self, invitation: Invitation, first_rank: int) -> str | None:
        """Join a group for `receive_broadcast` with all workers; returns None on success, else the reason."""
        return self._engine.join_broadcasts(invitation, first_rank)

    def receive_broadcast(self, specs: Sequence[TensorSpec]) -> str | None:
        """Receive one bucket by broadcast; returns None on success, else why it has to be sent again."""
        part = _Broadcast(specs)
        self._incoming.put(part, timeout=self._timeout_s)
        return part.failure.result(timeout=self._timeout_s)

    def _parts(self) -> Iterator[_Bucket | _Broadcast]:
        while (part := self._incoming.get(timeout=self._timeout_s)) is not None:
            yield part

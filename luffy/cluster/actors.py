"""The Ray actors of a trainer rank and of a vLLM engine, and the setup of their processes.

Each process imports this module before `ProcessSetup.apply`, so nothing heavy (torch, vLLM) is imported at the top.
"""

from __future__ import annotations

import importlib
import os
import queue
import socket
import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, TypeVarTuple

import ray

from luffy.errors import ClusterError
from luffy.library_loading import without_collections
from luffy.pipeline.inherited_environment import drop_foreign
from luffy.processes import name_interface

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from luffy.config.execution import VLLMConfig
    from luffy.config.model import LoRAConfig
    from luffy.rollout.engine import Completion, RolloutRequest, SamplingParams
    from luffy.rollout.vllm_worker import AdapterUpdate, WeightUpdate
    from luffy.tensor_sharing import SharedTensor, TensorSpec
    from luffy.training.ranks import Rank, RankSpec

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
        name_interface(ray.util.get_node_ip_address())  # the one that Ray uses
        if self.num_threads is not None:
            import torch

            os.environ["OMP_NUM_THREADS"] = str(self.num_threads)
            torch.set_num_threads(self.num_threads)


class RankActor:
    """One rank of the trainer."""

    def __init__(self, setup: ProcessSetup) -> None:
        setup.apply()
        with without_collections():  # or the specification that `open` gets would load them, and MLflow
            importlib.import_module("luffy.training.policy")

    def pid(self) -> int:
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
        return method(self._rank, *arguments)


@dataclass(frozen=True, slots=True)
class _Bucket:
    """Weights received through the object store, in its memory: bytes that must not be written to."""

    weights: Sequence[tuple[TensorSpec, NDArray[np.uint8]]]

    def load(self, update: WeightUpdate | AdapterUpdate) -> None:
        import torch

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that nothing may write to them
            for spec, data in self.weights:
                update.load(spec.name, spec.tensor(torch.from_numpy(data)))


@dataclass(frozen=True, slots=True)
class _Shared:
    """Weights in the memory of a rank that shares the device of the engine; they are copied from there."""

    specs: Sequence[TensorSpec]
    data: SharedTensor
    failure: Future[str | None] = field(default_factory=Future)
    """None once the weights are loaded, else the reason why not."""

    def load(self, update: WeightUpdate | AdapterUpdate) -> None:
        self.failure.set_result(self._copy(update))

    def _copy(self, update: WeightUpdate | AdapterUpdate) -> str | None:
        from luffy.tensor_sharing import SharingFailed

        try:
            with self.data.opened() as data:
                for spec, part in zip(self.specs, data.split([spec.num_bytes for spec in self.specs]), strict=True):
                    # Copied, since vLLM keeps tensors until their layer is complete.
                    update.load(spec.name, spec.tensor(part.clone()))
        except SharingFailed as failure:
            return str(failure)
        return None


class EngineActor:
    """One vLLM engine. Its methods run in several threads: generation continues while weights arrive."""

    def __init__(self, setup: ProcessSetup) -> None:
        setup.apply()
        self._incoming: queue.Queue[_Bucket | _Shared | None] = queue.Queue(maxsize=1)
        self._timeout_s = 0.0
        self._has_device = threading.Event()

    def pid(self) -> int:
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
        adapter: LoRAConfig | None = None,
        waits: bool = False,
    ) -> None:
        """Load the model folder.

        `sleeps` enables vLLM's sleep mode, for a GPU shared with a trainer rank; `reads_text` enables stop texts.
        `adapter`: what updates bring in place of weights. `waits`: what needs the device waits for `take_device`.
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
            adapter=adapter,
            before_loading=self._wait_for_device if waits else lambda: None,
        )

    def take_device(self) -> None:
        """Let an `open` that waits go on."""
        self._has_device.set()

    def _wait_for_device(self) -> None:
        if not self._has_device.wait(self._timeout_s):
            raise ClusterError(f"the device was not free for {self._timeout_s:g} s")

    def generate(self, requests: Sequence[RolloutRequest], params: SamplingParams) -> list[Completion]:
        return self._engine.generate(requests, params)

    def sleep(self) -> None:
        """Release the GPU memory, weights included (`VLLMEngine.sleep`)."""
        self._engine.sleep()

    def wake_up(self, part: str) -> None:
        """Allocate a part of the memory again: first `weights`, then, once they are loaded, `kv_cache`."""
        self._engine.wake_up(part)

    def load_weights(self, version: int) -> None:
        """Load weights or adapter from the buckets that the methods `receive...` announce, up to the final None."""
        with self._engine.weight_update(version) as update:
            while (part := self._incoming.get(timeout=self._timeout_s)) is not None:
                part.load(update)

    def load_weights_from(self, folder: Path, version: int) -> None:
        self._engine.load_weights_from(folder, version)

    def receive(self, bucket: Sequence[tuple[TensorSpec, NDArray[np.uint8]]] | None) -> None:
        """Queue one bucket of weights as bytes; blocks while another is queued, so at most two are in memory."""
        self._incoming.put(None if bucket is None else _Bucket(bucket), timeout=self._timeout_s)

    def receive_shared(self, specs: Sequence[TensorSpec], data: SharedTensor) -> str | None:
        """Copy one bucket from a rank's memory; returns None on success, else why it has to be sent again."""
        part = _Shared(specs, data)
        self._incoming.put(part, timeout=self._timeout_s)
        return part.failure.result(timeout=self._timeout_s)

"""Several vLLM engines on this machine, for the stages that sample from a finished model.

The pool decides which engine serves a call, and has no influence on the responses: each call of `generate` goes to one
engine as a whole, and vLLM's samples depend only on the requests of the call (`luffy.rollout.vllm_engine`). So the
responses are bit for bit those of a single engine, and `luffy.pipeline.identity` leaves this module out.
"""

import logging
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from luffy.cluster.ray_engine import EngineActors, RayEngine, has_gpus
from luffy.cluster.ray_session import layout_apart, ray_session, reserve
from luffy.cluster.supervision import Member, MemberDied, Supervisor
from luffy.config.execution import ExecutionConfig
from luffy.rollout.engine import Completion, RolloutRequest, SamplingParams

logger = logging.getLogger(__name__)
_NUM_THREADS = 2
"""Threads of an engine: one generates or loads weights, the other answers `pid`."""


class EnginePool:
    """`execution.vllm.engines` engines as one; `generate` is thread-safe, and as many calls as engines run at a time.

    A dead engine is replaced, and its call is repeated there with the same seeds.
    """

    def __init__(self, model: Path, execution: ExecutionConfig, dtype: str, max_model_len: int, out: Path) -> None:
        """Start engines on a model folder; `out` is the stage's directory, for their logs.

        Raises ConfigError where the machine is too small or vLLM refuses the model, ClusterError where an engine does
        not start.
        """
        vllm, number = execution.vllm, execution.vllm.engines
        # Always on this machine, whose GPUs the stage has locked, also when training joins a cluster.
        config = execution.ray.model_copy(update={"address": None})
        self._timeout_s = config.call_timeout_s
        self._supervisor = Supervisor()
        self._free: SimpleQueue[int] = SimpleQueue()
        self._loaded: tuple[Path, int] | None = None
        """The folder and version of the weights, once they are not those of `model`."""
        with ExitStack() as stack:
            stack.enter_context(ray_session(config, number))
            layout = layout_apart(0, number, vllm.tensor_parallel_size, has_gpus(config))
            group = reserve(layout, config.start_timeout_s)
            stack.callback(self._supervisor.close)
            actors = EngineActors(layout.engines, group, _NUM_THREADS, model, vllm, dtype, max_model_len, config, out)
            members = [actors.start(place) for place in range(number)]
            self._supervisor.answers(members, actors.open(members), config.start_timeout_s)
            self._engines = RayEngine(members, actors, self._supervisor, self._load)
            for place in range(number):
                self._free.put(place)
            self._stack = stack.pop_all()

    @property
    def num_restarts(self) -> int:
        """Number of engines replaced since the start."""
        return self._engines.num_restarts

    def generate(self, requests: Sequence[RolloutRequest], params: SamplingParams) -> list[Completion]:
        """One completion per request, in order, from the next free engine.

        Raises MemberDied when engines keep dying.
        """
        place = self._free.get()
        try:
            return self._engines.generate_at(place, requests, params)
        finally:
            self._free.put(place)

    def load_weights_from(self, folder: Path, version: int) -> None:
        """Replace the weights of all engines with those of a model folder, while none generates.

        The folder has to stay until the next call or `close`: a replaced engine reads it again.
        """
        self._loaded = folder, version
        self._engines.update(self._load)

    def close(self) -> None:
        """End the engines, and all calls with a ClusterError. May be called twice."""
        self._stack.close()

    def _load(self, members: Sequence[Member]) -> list[int]:
        """Load the current weights in every engine at the same time; returns the indices of those that died."""
        if self._loaded is None:  # an engine opens with these
            return []
        folder, version = self._loaded
        asked: list[Any] = [member.handle.load_weights_from.remote(folder, version) for member in members]
        dead = []
        for place, (member, reference) in enumerate(zip(members, asked, strict=True)):
            try:
                self._supervisor.answers([member], [reference], self._timeout_s)
            except MemberDied as death:
                logger.warning("%s", death)
                dead.append(place)
        return dead

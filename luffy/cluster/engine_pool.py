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

from ray.util.placement_group import PlacementGroup

from luffy.cluster.engine_actor import EngineActor
from luffy.cluster.placement import layout_apart, reserve
from luffy.cluster.rank_actor import ProcessSetup
from luffy.cluster.ray_engine import RayEngine
from luffy.cluster.ray_ranks import has_gpus, log_file, start_member
from luffy.cluster.ray_session import ray_session
from luffy.cluster.supervision import Member, MemberDied, Supervisor
from luffy.config.execution import ExecutionConfig
from luffy.errors import ClusterError
from luffy.rollout.engine import Completion, RolloutRequest, SamplingParams

logger = logging.getLogger(__name__)
_NUM_THREADS = 2
"""Threads of an engine: one generates or loads weights, the other answers `pid`."""


class EnginePool:
    """`execution.vllm.engines` engines as one; `generate` is thread-safe, and as many calls as engines run at a time.

    A dead engine is replaced, and its call is repeated there with the same seeds.
    """

    def __init__(self, model: Path, execution: ExecutionConfig, dtype: str, max_model_len: int, out: Path) -> None:
        self._model = model
        self._vllm = execution.vllm
        # Always on this machine, whose GPUs the stage has locked, also when training joins a cluster.
        self._ray = execution.ray.model_copy(update={"address": None})
        self._dtype = dtype
        self._max_model_len = max_model_len
        self._out = out
        self._stack = ExitStack()
        self._supervisor = Supervisor()
        self._free: SimpleQueue[int] = SimpleQueue()
        self._loaded: tuple[Path, int] | None = None
        """The folder and version of the weights, once they are not those of `model`."""

    @classmethod
    def start(
        cls, model: Path, execution: ExecutionConfig, dtype: str, *, max_model_len: int, out: Path
    ) -> "EnginePool":
        """Engines on a model folder; `out` is the stage's directory, for their logs.

        Raises ConfigError where the machine is too small or vLLM refuses the model, ClusterError where an engine does
        not start.
        """
        pool = cls(model, execution, dtype, max_model_len, out)
        with ExitStack() as on_failure:
            on_failure.callback(pool.close)
            pool._start()
            on_failure.pop_all()
        return pool

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

    def _start(self) -> None:
        number = self._vllm.engines
        self._stack.enter_context(ray_session(self._ray, number))
        self._layout = layout_apart(0, number, self._vllm.tensor_parallel_size, has_gpus(self._ray))
        self._group: PlacementGroup = reserve(self._layout, self._ray.start_timeout_s)
        self._stack.callback(self._supervisor.close)
        members = [self._start_member(place) for place in range(number)]
        self._open(members)
        self._engines = RayEngine(members, self._replace, self._supervisor, self._ray.call_timeout_s)
        for place in range(number):
            self._free.put(place)

    def _start_member(self, place: int) -> Member:
        setup = ProcessSetup(log_file(self._out, f"engine_{place}"), num_threads=None)
        at = self._layout.engines[place]
        return start_member(f"engine {place}", EngineActor, at, self._group, setup, _NUM_THREADS)

    def _open(self, members: Sequence[Member]) -> None:
        """Load the model folder in every engine at the same time."""
        timeout_s = self._ray.call_timeout_s
        asked: list[Any] = [
            member.handle.open.remote(
                self._model, self._vllm, self._dtype, self._max_model_len, timeout_s, reads_text=True
            )
            for member in members
        ]
        self._supervisor.answers(members, asked, self._ray.start_timeout_s)

    def _load(self, members: Sequence[Member]) -> list[int]:
        """Load the current weights in every engine at the same time; returns the indices of those that died."""
        assert self._loaded is not None
        folder, version = self._loaded
        asked: list[Any] = [member.handle.load_weights_from.remote(folder, version) for member in members]
        dead = []
        for place, (member, reference) in enumerate(zip(members, asked, strict=True)):
            try:
                self._supervisor.answers([member], [reference], self._ray.call_timeout_s)
            except MemberDied as death:
                logger.warning("%s", death)
                dead.append(place)
        return dead

    def _replace(self, place: int, dead: Member) -> Member:
        """A new engine with the current weights."""
        member = self._start_member(place)
        self._open([member])
        if self._loaded is not None and self._load([member]):
            raise ClusterError(f"{member.name} did not take the weights after a restart; see {member.log}")
        return member

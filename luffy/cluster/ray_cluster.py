"""`cluster: ray`: DeepSpeed ranks and vLLM engines as Ray actors, on one machine or many."""

import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, TypeVar, TypeVarTuple

import ray
import torch
from ray.actor import ActorHandle
from ray.util.placement_group import PlacementGroup

from luffy.cluster.actors import EngineActor, ProcessSetup, RankActor
from luffy.cluster.placement import Place, layout, reserve, stand_at
from luffy.cluster.ray_engine import RayEngine
from luffy.cluster.ray_session import ray_session
from luffy.cluster.servers import Servers
from luffy.cluster.supervision import Member, Supervisor
from luffy.errors import ClusterError
from luffy.rollout.engine import RolloutEngine
from luffy.training.trainer import Trainer, TrainerRank, TrainerSpec

_LOGS = "logs"
_UPDATE_THREADS = 3
"""Threads of an engine besides those that generate: `load_weights`, `receive`, and one for other calls."""
_SEND_TIMEOUT_S = 300.0
"""Time limit for sending all weights to the engines; under ZeRO 3 the other ranks wait in a collective meanwhile."""
_NEED_GPU = (TrainerRank.learn, TrainerRank.sft_step, TrainerRank.entropies)
"""Methods of a rank that need more GPU memory than it holds permanently."""
_Arguments = TypeVarTuple("_Arguments")
_Result = TypeVar("_Result")


class RayCluster:
    """Trainer ranks and engines, each in its own process. A context manager: all of them end with it.

    With `rl.engine: openai` only the ranks run here, and the engines are servers elsewhere. Colocated on GPUs, engines
    sleep while the trainer learns and wake up with new weights.
    """

    def __init__(self, spec: TrainerSpec) -> None:
        self._spec = spec
        self._config = spec.execution.ray
        self._stack = ExitStack()
        self._supervisor = Supervisor()
        self._submitting = threading.Lock()
        self._published = 0
        self._asleep = False
        self._servers: Servers | None = None

    def __enter__(self) -> "RayCluster":
        spec, config = self._spec, self._config
        with self._stack:
            if spec.settings.rl.engine == "openai":
                self._servers = Servers(spec)
                self._stack.callback(self._servers.close)
            num_engines = 0 if self._servers else config.engines
            self._stack.enter_context(ray_session(config, config.trainer_ranks + num_engines))
            gpus = torch.cuda.is_available() if config.address is None else ray.cluster_resources().get("GPU", 0) > 0
            self._share_gpus = gpus and num_engines > 0 and config.placement == "colocated"
            self._layout = layout(config, spec.execution.vllm.tensor_parallel_size, gpus, num_engines)
            self._group: PlacementGroup = reserve(self._layout, config.start_timeout_s)
            self._stack.callback(self._supervisor.close)
            engines = [self._start_engine(place) for place in range(num_engines)]
            self._ranks = [self._start_rank(rank) for rank in range(config.trainer_ranks)]
            if self._share_gpus:
                # One after the other: vLLM's memory profiling counts any change on its GPU as its own use.
                self._wait(self._ranks, self._open_ranks())
                self._ask_ranks(RankActor.free_cache, [()] * len(self._ranks))
                self._wait(engines, self._open_engines(engines))
            else:
                # In parallel: both load libraries and a model.
                self._wait(engines + self._ranks, self._open_engines(engines) + self._open_ranks())
            self.trainer = Trainer(spec.settings, len(self._ranks), self._call)
            self._engines = RayEngine(engines, self._replace_engine, self._supervisor, config.call_timeout_s)
            self._stack = self._stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def engine(self) -> RolloutEngine:
        """Generates with the weights published last."""
        return self._engines if self._servers is None else self._servers.engine

    def publish(self, version: int) -> None:
        """Send the trainer's weights to every engine; running rollouts continue after the update."""
        if version == self._published and not self._asleep:
            return  # engines and trainer start with the same weights
        self._published = version
        if self._servers is not None:
            self._servers.update(self.trainer, version)
            return
        if self._asleep:
            self._ask_ranks(RankActor.free_cache, [()] * len(self._ranks))
            self._engines.ask("wake_up", "weights")
        self._engines.update(self._send)
        if self._asleep:
            self._engines.ask("wake_up", "kv_cache")
            self._asleep = False

    def metrics(self) -> dict[str, float]:
        """Number of engines replaced since the start."""
        return {} if self._servers else {"perf/engine_restarts": float(self._engines.num_restarts)}

    def _call(
        self, method: Callable[[TrainerRank, *_Arguments], _Result], arguments: Sequence[tuple[*_Arguments]]
    ) -> list[_Result]:
        if self._share_gpus and method in _NEED_GPU and not self._asleep:
            self._engines.ask("sleep")
            self._asleep = True
        return self._ask_ranks(RankActor.call, [(method, *of_rank) for of_rank in arguments])

    def _ask_ranks(
        self, method: Callable[[RankActor, *_Arguments], _Result], arguments: Sequence[tuple[*_Arguments]]
    ) -> list[_Result]:
        # The calls contain collectives, so every rank has to receive them in the same order.
        with self._submitting:
            asked = [
                getattr(member.handle, method.__name__).remote(*of_rank)
                for member, of_rank in zip(self._ranks, arguments, strict=True)
            ]
        return self._supervisor.answers(self._ranks, asked, self._config.call_timeout_s)

    def _send(self, engines: Sequence[Member]) -> list[int]:
        """Indices of the engines that did not take the weights."""
        handles = [member.handle for member in engines]
        # Shorter than the time limit of the ranks' call, or a hanging engine would be reported as a hanging rank.
        timeout_s = min(self._config.call_timeout_s / 4, _SEND_TIMEOUT_S)
        arguments = [(handles, self._published, timeout_s)] * len(self._ranks)
        return self._ask_ranks(RankActor.send_weights, arguments)[0]

    def _start_rank(self, rank: int) -> Member:
        return self._member(f"trainer rank {rank}", RankActor, self._layout.ranks[rank], f"rank_{rank}.log")

    def _open_ranks(self) -> list[Any]:
        (meeting_point,) = self._wait(self._ranks[:1], [self._ranks[0].handle.meeting_point.remote()])
        return [
            member.handle.open.remote(self._spec, rank, len(self._ranks), meeting_point)
            for rank, member in enumerate(self._ranks)
        ]

    def _start_engine(self, place: int) -> Member:
        num_threads = self._spec.settings.rl.max_staleness + 1 + _UPDATE_THREADS
        where = self._layout.engines[place]
        return self._member(f"engine {place}", EngineActor, where, f"engine_{place}.log", num_threads)

    def _open_engines(self, engines: Sequence[Member]) -> list[Any]:
        spec, timeout_s = self._spec, self._config.call_timeout_s
        return [
            member.handle.open.remote(
                spec.model, spec.execution.vllm, spec.settings.dtype, spec.longest, timeout_s, self._share_gpus
            )
            for member in engines
        ]

    def _wait(self, members: Sequence[Member], asked: Sequence[Any]) -> list[Any]:
        return self._supervisor.answers(members, asked, self._config.start_timeout_s)

    def _replace_engine(self, place: int, dead: Member) -> Member:
        """A new engine with the trainer's current weights, which may be newer than those of the other engines."""
        member = self._start_engine(place)
        self._wait([member], self._open_engines([member]))
        if self._send([member]):
            raise ClusterError(f"{member.name} did not take the weights after a restart; see {member.log}")
        return member

    def _member(self, name: str, actor: type, place: Place, log: str, num_threads: int = 1) -> Member:
        path = self._spec.out / _LOGS / log
        options = stand_at(place, self._group) | {"max_concurrency": num_threads, "max_restarts": 0}
        # torch.set_num_threads holds for the calling thread alone, and an engine steps in several threads.
        setup = ProcessSetup(path, None if actor is EngineActor else self._spec.execution.num_threads)
        handle: object = ray.remote(actor).options(**options).remote(setup)
        assert isinstance(handle, ActorHandle)  # by Ray's annotation it may also be the class itself
        return Member(name, handle, path)

"""`cluster: ray`: DeepSpeed ranks and vLLM engines as Ray actors, on one machine or many."""

import threading
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import ray
import torch
from ray.actor import ActorHandle
from ray.util.placement_group import PlacementGroup, remove_placement_group

from luffy.cluster.actors import EngineActor, ProcessSetup, RankActor
from luffy.cluster.placement import Layout, in_bundle, layout, reserve
from luffy.cluster.ray_engine import RayEngine
from luffy.cluster.ray_session import ray_session
from luffy.cluster.supervision import Member, answers
from luffy.errors import ClusterError
from luffy.training.trainer import Trainer, TrainerSpec

_LOGS = "logs"
_ENGINE_THREADS = 16
"""Calls that an engine takes at the same time: rollouts of several steps, and an update in two threads."""


class RayCluster:
    """Trainer ranks and engines, each a process of its own. A context manager: all of them end with it."""

    def __init__(self, spec: TrainerSpec) -> None:
        self._spec = spec
        self._config = spec.execution.ray
        self._stack = ExitStack()
        self._submitting = threading.Lock()
        self._published = 0

    def __enter__(self) -> "RayCluster":
        with self._stack:
            config = self._config
            self._stack.enter_context(ray_session(config, config.trainer_ranks + config.engines))
            gpus = torch.cuda.is_available() if config.address is None else ray.cluster_resources().get("GPU", 0) > 0
            self._layout: Layout = layout(config, self._spec.execution.vllm.tensor_parallel_size, gpus)
            self._group: PlacementGroup = reserve(self._layout, config.start_timeout_s)
            self._stack.callback(remove_placement_group, self._group)
            self._ranks = self._start_ranks()
            self.trainer = Trainer(self._spec.settings, len(self._ranks), self._call)
            engines = [self._start_engine(place) for place in range(config.engines)]
            self._open_together(engines)
            self.engine = RayEngine(engines, self._replace_engine, config.call_timeout_s)
            self._stack = self._stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def publish(self, version: int) -> None:
        """Send the trainer's weights to every engine; rollouts that run go on behind the update."""
        if version == self._published:
            return  # engines start with the weights that the trainer starts with
        for place in self._send(self.engine.members):
            self.engine.restart(place, self.engine.members[place])
        self._published = version

    def _call(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        return self._ask_ranks([(method, *of_rank) for of_rank in arguments], "call")

    def _ask_ranks(self, arguments: Sequence[tuple[Any, ...]], remote: str) -> list[Any]:
        # Ranks answer in the order they are asked in, which must be the same on all of them: they meet in collectives.
        with self._submitting:
            asked = [
                getattr(member.handle, remote).remote(*of_rank)
                for member, of_rank in zip(self._ranks, arguments, strict=True)
            ]
        return answers(self._ranks, asked, self._config.call_timeout_s)

    def _send(self, engines: Sequence[Member]) -> list[int]:
        """Places of the engines that did not take the weights."""
        handles = [member.handle for member in engines]
        arguments = [(handles, self._config.call_timeout_s)] * len(self._ranks)
        return self._ask_ranks(arguments, "send_weights")[0]

    def _start_ranks(self) -> list[Member]:
        members = [
            self._member(f"trainer rank {rank}", RankActor, rank, bundle, log=f"rank_{rank}.log")
            for rank, bundle in enumerate(self._layout.ranks)
        ]
        timeout_s = self._config.start_timeout_s
        (meeting_point,) = answers(members[:1], [members[0].handle.meeting_point.remote()], timeout_s)
        opening = [
            member.handle.open.remote(self._spec, rank, len(members), meeting_point)
            for rank, member in enumerate(members)
        ]
        answers(members, opening, timeout_s)
        return members

    def _start_engine(self, place: int) -> Member:
        index = len(self._layout.ranks) + place
        bundle = self._layout.engines[place]
        return self._member(f"engine {place}", EngineActor, index, bundle, f"engine_{place}.log", _ENGINE_THREADS)

    def _open_together(self, engines: Sequence[Member]) -> None:
        spec, config = self._spec, self._config
        opening = [
            member.handle.open.remote(
                spec.model, spec.execution.vllm, spec.settings.dtype, spec.longest, config.call_timeout_s
            )
            for member in engines
        ]
        answers(engines, opening, config.start_timeout_s)

    def _replace_engine(self, place: int, dead: Member) -> Member:
        """A new engine with the trainer's present weights, which may be newer than those of the others."""
        member = self._start_engine(place)
        self._open_together([member])
        if self._send([member]):
            raise ClusterError(f"{member.name} did not take the weights after a restart; see {member.log}")
        return member

    def _member(
        self, name: str, actor: type, index: int, bundle: dict[str, float], log: str, num_threads: int = 1
    ) -> Member:
        path = self._spec.out / _LOGS / log
        options = in_bundle(self._group, index, bundle) | {"max_concurrency": num_threads, "max_restarts": 0}
        handle: ActorHandle = (
            ray.remote(actor).options(**options).remote(ProcessSetup(path, self._spec.execution.num_threads))  # type: ignore[assignment]
        )
        return Member(name, handle, path)

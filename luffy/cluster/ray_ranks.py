"""The ranks of a training process group as Ray actors."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Generic, TypeVarTuple

import ray
import torch
from ray.actor import ActorHandle
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from luffy.cluster.actors import ProcessSetup, RankActor
from luffy.cluster.placement import Place, by_machine, layout, reserve
from luffy.cluster.ray_session import ray_session
from luffy.cluster.supervision import Member, Supervisor
from luffy.config.execution import RayConfig
from luffy.training.rank_calls import Rank, RankSpec, Result

_LOGS = "logs"
_Arguments = TypeVarTuple("_Arguments")


class RayRanks(Generic[Rank]):
    """One actor for each of `places`; call `open` before anything else, and wait for what it returns."""

    def __init__(
        self, spec: RankSpec[Rank], places: Sequence[Place], group: PlacementGroup, supervisor: Supervisor
    ) -> None:
        self._spec = spec
        self._config = spec.execution.ray
        self._supervisor = supervisor
        self._submitting = threading.Lock()
        slices = spec.execution.sequence_parallel
        self._places = places
        if slices > 1:
            self._places = by_machine(places, ray.util.placement_group_table(group)["bundles_to_node_id"], slices)
        self.members = [
            start_member(
                f"trainer rank {rank}",
                RankActor,
                place,
                group,
                ProcessSetup(log_file(spec.out, f"rank_{rank}"), spec.execution.num_threads),
            )
            for rank, place in enumerate(self._places)
        ]

    @property
    def num_ranks(self) -> int:
        return len(self.members)

    @property
    def num_gpus(self) -> int:
        return round(sum(place.gpus for place in self._places))

    def open(self) -> list[Any]:
        """Have every rank join the process group and load its model; returns a reference to each answer."""
        first = self.members[0]
        asked = [first.handle.meeting_point.remote()]
        (meeting_point,) = self._supervisor.answers([first], asked, self._config.start_timeout_s)
        return [
            member.handle.open.remote(self._spec, rank, self.num_ranks, meeting_point)
            for rank, member in enumerate(self.members)
        ]

    def call(
        self, method: Callable[[Rank, *_Arguments], Result], arguments: Sequence[tuple[*_Arguments]]
    ) -> list[Result]:
        """Call a method of the rank in every actor at once; `arguments` and the results are in order of rank."""
        # The calls contain collectives, so every rank has to receive them in the same order.
        with self._submitting:
            asked = [
                member.handle.call.remote(method, *of_rank)
                for member, of_rank in zip(self.members, arguments, strict=True)
            ]
        return self._supervisor.answers(self.members, asked, self._config.call_timeout_s)


@contextmanager
def ray_ranks(spec: RankSpec[Rank]) -> Iterator[RayRanks[Rank]]:
    """Ranks without engines, on `execution.ray.trainer_ranks` GPUs (or CPUs); they end with the context."""
    config, supervisor = spec.execution.ray, Supervisor()
    with ray_session(config, config.trainer_ranks):
        places = layout(config, 1, has_gpus(config), num_engines=0)
        try:
            ranks = RayRanks(spec, places.ranks, reserve(places, config.start_timeout_s), supervisor)
            supervisor.answers(ranks.members, ranks.open(), config.start_timeout_s)
            yield ranks
        finally:
            supervisor.close()


def has_gpus(config: RayConfig) -> bool:
    """Whether the cluster has GPUs, according to Ray for a joined cluster, and to torch for one of this machine."""
    return torch.cuda.is_available() if config.address is None else ray.cluster_resources().get("GPU", 0) > 0


def log_file(out: Path, process: str) -> Path:
    """Where a process of the stage in `out` writes."""
    return out / _LOGS / f"{process}.log"


def start_member(
    name: str, actor: type, place: Place, group: PlacementGroup, setup: ProcessSetup, num_threads: int = 1
) -> Member:
    """Start an actor at `place` that answers `num_threads` calls at the same time, and is never restarted by Ray."""
    remote: Any = ray.remote(actor).options(
        num_cpus=place.cpus,
        num_gpus=place.gpus,
        scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=place.bundle),
        max_concurrency=num_threads,
        max_restarts=0,
    )
    handle: object = remote.remote(setup)
    assert isinstance(handle, ActorHandle)  # Ray's annotation also admits the class, for editors
    return Member(name, handle, setup.log)

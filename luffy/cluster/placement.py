"""Where ranks and engines stand: one Ray placement group, its bundles numbered ranks first."""

from collections.abc import Sequence
from dataclasses import dataclass

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from luffy.config.execution import RayConfig
from luffy.errors import ClusterError, ConfigError

Bundle = dict[str, float]


@dataclass(frozen=True, slots=True)
class Place:
    """Where one process stands."""

    bundle: int
    """Which one of the placement group."""
    cpus: float
    gpus: float
    """Less than 1: of a GPU that it shares."""


@dataclass(frozen=True, slots=True)
class Layout:
    """What is asked of Ray, and who gets what of it."""

    bundles: Sequence[Bundle]
    ranks: Sequence[Place]
    engines: Sequence[Place]

    def total(self, kind: str) -> float:
        """Of all bundles."""
        return sum(bundle.get(kind, 0) for bundle in self.bundles)


def layout(config: RayConfig, tensor_parallel_size: int, gpus: bool, num_engines: int) -> Layout:
    """One GPU a rank, `tensor_parallel_size` an engine; without GPUs, a CPU each.

    A bundle lies on one machine, so that an engine, which is one process, cannot be split over two. Colocated, an
    engine takes half of the GPU of its rank (which is only how Ray counts), with GPUs alone: CPUs are shared anyway.
    """
    if gpus and num_engines and config.placement == "colocated":
        halves = [Place(rank, cpus=1, gpus=0.5) for rank in range(config.trainer_ranks)]
        return Layout([{"CPU": 2, "GPU": 1}] * config.trainer_ranks, halves, halves)
    of_engine = tensor_parallel_size if gpus else 0
    of_rank = 1 if gpus else 0
    ranks = [Place(rank, 1, of_rank) for rank in range(config.trainer_ranks)]
    engines = [Place(config.trainer_ranks + engine, 1, of_engine) for engine in range(num_engines)]
    bundles: list[Bundle] = [{"CPU": 1} | ({"GPU": place.gpus} if gpus else {}) for place in (*ranks, *engines)]
    return Layout(bundles, ranks, engines)


def reserve(wanted: Layout, timeout_s: float) -> PlacementGroup:
    """The resources of a run, all of them or none; Ray takes them back when this process leaves it.

    Raises ConfigError when the cluster does not have them at all, ClusterError when they are not free in time.
    """
    there = ray.cluster_resources()
    for kind in ("GPU", "CPU"):
        number = wanted.total(kind)
        if number > there.get(kind, 0):
            raise ConfigError(
                f"execution.ray: trainer_ranks {len(wanted.ranks)} and engines {len(wanted.engines)} need "
                f"{number:g} {kind}s, the cluster has {there.get(kind, 0):g}; lower them or add machines"
            )
    group = placement_group(list(wanted.bundles), strategy="PACK")
    if not group.wait(timeout_s):
        remove_placement_group(group)
        raise ClusterError(
            f"{wanted.total('GPU'):g} GPUs and {wanted.total('CPU'):g} CPUs did not become free within "
            f"{timeout_s:g} s; is another run using the cluster?"
        )
    return group


def stand_at(place: Place, group: PlacementGroup) -> dict[str, object]:
    """Options of an actor that stands there."""
    return {
        "num_cpus": place.cpus,
        "num_gpus": place.gpus,
        "scheduling_strategy": PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=place.bundle),
    }

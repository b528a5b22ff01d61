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
class Layout:
    """What is asked of Ray: a bundle for each rank, and one for each engine."""

    ranks: Sequence[Bundle]
    engines: Sequence[Bundle]

    @property
    def bundles(self) -> list[Bundle]:
        return [*self.ranks, *self.engines]

    @property
    def gpus(self) -> float:
        return sum(bundle.get("GPU", 0) for bundle in self.bundles)


def layout(config: RayConfig, tensor_parallel_size: int, gpus: bool) -> Layout:
    """One GPU a rank, `tensor_parallel_size` an engine; without GPUs, a CPU each.

    An engine is one process on one machine, so that its bundle cannot be split over two.
    """
    rank: Bundle = {"CPU": 1, "GPU": 1} if gpus else {"CPU": 1}
    engine: Bundle = {"CPU": 1, "GPU": tensor_parallel_size} if gpus else {"CPU": 1}
    return Layout([rank] * config.trainer_ranks, [engine] * config.engines)


def reserve(wanted: Layout, timeout_s: float) -> PlacementGroup:
    """The resources of a run, all of them or none.

    Raises ConfigError when the cluster does not have them at all, ClusterError when they are not free in time.
    """
    there = ray.cluster_resources()
    if wanted.gpus > there.get("GPU", 0):
        raise ConfigError(
            f"execution.ray: trainer_ranks {len(wanted.ranks)} and engines {len(wanted.engines)} need "
            f"{wanted.gpus:g} GPUs, the cluster has {there.get('GPU', 0):g}; lower them or add machines"
        )
    group = placement_group(wanted.bundles, strategy="PACK")
    if not group.wait(timeout_s):
        remove_placement_group(group)
        raise ClusterError(
            f"{wanted.gpus:g} GPUs and {len(wanted.bundles)} CPUs did not become free within {timeout_s:g} s; "
            "is another run using the cluster?"
        )
    return group


def in_bundle(group: PlacementGroup, index: int, bundle: Bundle) -> dict[str, object]:
    """Options of an actor that takes the whole of a bundle."""
    return {
        "num_cpus": bundle["CPU"],
        "num_gpus": bundle.get("GPU", 0),
        "scheduling_strategy": PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index),
    }

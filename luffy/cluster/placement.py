"""Placement of ranks and engines: one Ray placement group, with the bundles of the ranks first."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from luffy.config.execution import RayConfig
from luffy.errors import ClusterError, ConfigError

logger = logging.getLogger(__name__)
_QUIET_S = 10.0
"""A longer wait for resources is logged once."""
Bundle = dict[str, float]


@dataclass(frozen=True, slots=True)
class Place:
    """Resources of one process."""

    bundle: int
    """Index in the placement group."""
    cpus: float
    gpus: float
    """A fraction for a shared GPU."""


@dataclass(frozen=True, slots=True)
class Layout:
    """The bundles to request from Ray, and the place of each process in them."""

    bundles: Sequence[Bundle]
    ranks: Sequence[Place]
    engines: Sequence[Place]

    def total(self, kind: str) -> float:
        """Amount of a resource (`GPU`, `CPU`) over all bundles."""
        return sum(bundle.get(kind, 0) for bundle in self.bundles)


def layout(config: RayConfig, tensor_parallel_size: int, gpus: bool, num_engines: int) -> Layout:
    """One GPU per rank, `tensor_parallel_size` per engine; without GPUs, one CPU each.

    A bundle lies on one machine, so an engine, which is one process, is never split over two. When colocated on GPUs,
    a rank and its engine request half a GPU each, which is bookkeeping for Ray: both can use all of it.
    """
    if gpus and num_engines and config.placement == "colocated":
        halves = [Place(rank, cpus=1, gpus=0.5) for rank in range(config.trainer_ranks)]
        return Layout([{"CPU": 2, "GPU": 1}] * config.trainer_ranks, halves, halves)
    return layout_apart(config.trainer_ranks, num_engines, tensor_parallel_size, gpus)


def layout_apart(num_ranks: int, num_engines: int, tensor_parallel_size: int, gpus: bool) -> Layout:
    """Every rank and every engine on GPUs of its own; without GPUs, a CPU each."""
    of_engine = tensor_parallel_size if gpus else 0
    of_rank = 1 if gpus else 0
    ranks = [Place(rank, 1, of_rank) for rank in range(num_ranks)]
    engines = [Place(num_ranks + engine, 1, of_engine) for engine in range(num_engines)]
    bundles: list[Bundle] = [{"CPU": 1} | ({"GPU": place.gpus} if gpus else {}) for place in (*ranks, *engines)]
    return Layout(bundles, ranks, engines)


def reserve(wanted: Layout, timeout_s: float) -> PlacementGroup:
    """Reserve all resources of a run or none; Ray releases them when this process disconnects.

    Raises ConfigError when the cluster is too small, ClusterError when the resources are not free in time.
    """
    there = ray.cluster_resources()
    # The settings that the layout comes from; one without ranks is an evaluation's.
    claim = f"execution.ray: trainer_ranks {len(wanted.ranks)} and engines {len(wanted.engines)}"
    if not wanted.ranks:
        claim = f"execution.vllm: engines {len(wanted.engines)} over tensor_parallel_size GPUs each"
    for kind in ("GPU", "CPU"):
        number = wanted.total(kind)
        if number > there.get(kind, 0):
            raise ConfigError(
                f"{claim} need {number:g} {kind}s, the cluster has {there.get(kind, 0):g}; lower them or add machines"
            )
    group = placement_group(list(wanted.bundles), strategy="PACK")
    if not group.wait(min(_QUIET_S, timeout_s)):
        logger.warning("waiting for GPUs and CPUs of the Ray cluster, for %g s at most", timeout_s)
    if not group.wait(max(timeout_s - _QUIET_S, 0)):
        remove_placement_group(group)
        raise ClusterError(
            f"{wanted.total('GPU'):g} GPUs and {wanted.total('CPU'):g} CPUs did not become free within "
            f"{timeout_s:g} s; is another run using the cluster?"
        )
    return group


def by_machine(places: Sequence[Place], machine_of: Mapping[int, str], together: int) -> list[Place]:
    """The places of the ranks, reordered so that each `together` consecutive ones are on one machine.

    `machine_of` has the machine of each bundle. Raises ClusterError where the reserved places do not allow it.
    """
    ordered = sorted(places, key=lambda place: (machine_of[place.bundle], place.bundle))
    for first in range(0, len(ordered), together):
        machines = {machine_of[place.bundle] for place in ordered[first : first + together]}
        if len(machines) > 1:
            raise ClusterError(
                f"execution.sequence_parallel: {together} ranks share each sequence and have to be on one machine, but "
                f"Ray has placed some of them on {len(machines)}; use a number that divides the GPUs of every machine"
            )
    return ordered

"""Where training runs: in this process, or on Ray with DeepSpeed ranks and vLLM engines as actors."""

from contextlib import AbstractContextManager, nullcontext
from typing import Literal

from luffy.cluster.local import LocalCluster
from luffy.cluster.protocol import Cluster
from luffy.training.rank_calls import LocalRanks, Rank, Ranks, RankSpec
from luffy.training.trainer import TrainerSpec

__all__ = ["Cluster", "open_cluster", "open_ranks"]


def open_cluster(spec: TrainerSpec) -> Cluster:
    """The cluster that the `cluster` setting names."""
    if spec.settings.cluster == "ray":
        from luffy.cluster.ray_cluster import RayCluster  # imported here so that local runs need no Ray

        return RayCluster(spec)
    return LocalCluster(spec)


def open_ranks(cluster: Literal["local", "ray"], spec: RankSpec[Rank]) -> AbstractContextManager[Ranks[Rank]]:
    """Ranks without engines: one in this process, or `execution.ray.trainer_ranks` on Ray."""
    if cluster == "ray":
        from luffy.cluster.ray_ranks import ray_ranks

        return ray_ranks(spec)
    return nullcontext(LocalRanks(spec.open_rank()))

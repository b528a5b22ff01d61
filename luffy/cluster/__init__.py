"""Where RL runs: in this process, or on Ray with DeepSpeed ranks and vLLM engines as actors."""

from luffy.cluster.local import LocalCluster
from luffy.cluster.protocol import Cluster
from luffy.training.trainer import TrainerSpec

__all__ = ["Cluster", "open_cluster"]


def open_cluster(spec: TrainerSpec) -> Cluster:
    """The cluster that the `cluster` setting names."""
    if spec.settings.cluster == "ray":
        from luffy.cluster.ray_cluster import RayCluster  # imported here so that local runs need no Ray

        return RayCluster(spec)
    return LocalCluster(spec)

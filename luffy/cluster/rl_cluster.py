"""Opens the cluster that RL runs on."""

from luffy.cluster.local import LocalCluster
from luffy.cluster.protocol import Cluster
from luffy.training.learner import TrainerSpec


def open_cluster(spec: TrainerSpec) -> Cluster:
    """The cluster that `cluster` in the settings names; a context manager."""
    if spec.settings.cluster == "ray":
        from luffy.cluster.ray_cluster import RayCluster  # imported here so that local runs need no Ray

        return RayCluster(spec)
    return LocalCluster(spec)

"""Opens what training runs on: a cluster for RL, ranks for SFT."""

from contextlib import AbstractContextManager, nullcontext
from typing import Literal, Protocol

from luffy.rollout.engine import RolloutEngine
from luffy.training.learner import Trainer, TrainerSpec
from luffy.training.rank_calls import LocalRanks, Rank, Ranks, RankSpec


class Cluster(Protocol):
    """A trainer, a rollout engine, and the transfer of weights between them.

    A context manager: everything it started ends with the context.
    """

    @property
    def trainer(self) -> Trainer: ...

    @property
    def engine(self) -> RolloutEngine:
        """Generates with the weights published last."""
        ...

    def publish(self, version: int) -> None:
        """Send the trainer's current weights, after `version` RL steps, to the engine unless it has them."""
        ...

    def metrics(self) -> dict[str, float]:
        """Metrics of the cluster for the step's log (`perf/`)."""
        ...

    def __enter__(self) -> "Cluster": ...

    def __exit__(self, *_: object) -> None: ...


def open_cluster(spec: TrainerSpec) -> Cluster:
    """The cluster that `cluster` in the settings names; a context manager."""
    if spec.settings.cluster == "ray":
        from luffy.cluster.ray_cluster import RayCluster  # imported here so that local runs need no Ray

        return RayCluster(spec)
    from luffy.cluster.local import LocalCluster  # imported here so that SFT needs no engine

    return LocalCluster(spec)


def open_ranks(cluster: Literal["local", "ray"], spec: RankSpec[Rank]) -> AbstractContextManager[Ranks[Rank]]:
    """Ranks without engines: one in this process, or `execution.ray.trainer_ranks` on Ray."""
    if cluster == "ray":
        from luffy.cluster.ray_ranks import ray_ranks  # imported here so that local runs need no Ray

        return ray_ranks(spec)
    return nullcontext(LocalRanks(spec.open_rank()))

"""Opens the ranks that SFT runs on."""

from contextlib import AbstractContextManager, nullcontext
from typing import Literal

from luffy.training.rank_calls import LocalRanks, Rank, Ranks, RankSpec


def open_ranks(cluster: Literal["local", "ray"], spec: RankSpec[Rank]) -> AbstractContextManager[Ranks[Rank]]:
    """Ranks without engines: one in this process, or `execution.ray.trainer_ranks` on Ray."""
    if cluster == "ray":
        from luffy.cluster.ray_ranks import ray_ranks  # imported here so that local runs need no Ray

        return ray_ranks(spec)
    return nullcontext(LocalRanks(spec.open_rank()))

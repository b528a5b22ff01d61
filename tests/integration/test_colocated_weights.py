"""Weights that engines copy from the memory of the rank beside them: real Ray, DeepSpeed ranks (ZeRO 3) and vLLM.

On CPUs through shared memory, by the calls that share a GPU's memory. Published are the merged weights of a LoRA
adapter and the base's other weights. One cluster for all tests, in order.
"""

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from reference.ray_case import REQUESTS, groups_of, largest_gap, model_of, params, spec_of
from support.installed import needs_vllm
from synthetic.gated_actors import GatedEngineActor, GatedRankActor
from synthetic.placed_kill import kill_at, pid_of

from luffy.cluster import ray_engine
from luffy.cluster.ray_cluster import RayCluster
from luffy.config.model import LoRAConfig
from luffy.tensor_sharing import SharedTensor
from luffy.training.learner import TrainerRank

pytestmark = [pytest.mark.slow, needs_vllm]
TESTS = Path(__file__).parents[1]
MAX_GAP = 1e-4


@pytest.fixture(scope="module")
def cluster(tmp_path_factory) -> Iterator[RayCluster]:
    spec = spec_of(
        tmp_path_factory.mktemp("ray"), model_of(tied=True), zero_stage=3,
        lora=LoRAConfig(rank=4, alpha=8.0),
        trainer_ranks=2, engines=2, placement="colocated",
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(TESTS), prepend=os.pathsep)  # Ray's workers import the gated actors
        patch.setattr(ray_engine, "EngineActor", GatedEngineActor)
        patch.setattr(ray_engine, "RankActor", GatedRankActor)
        with RayCluster(spec) as cluster:
            yield cluster


def update_and_publish(cluster: RayCluster, step: int) -> None:
    cluster.trainer.learn(groups_of(step), step)
    cluster.publish(step)
    assert_both_engines_have_the_weights(cluster, step)


def assert_both_engines_have_the_weights(cluster: RayCluster, step: int) -> None:
    folder = cluster._spec.out / f"after_{step}"
    cluster.trainer.export(folder)
    for engine in range(2):
        found = cluster._engines.generate_at(engine, REQUESTS, params())
        assert largest_gap(folder, REQUESTS, found) < MAX_GAP < largest_gap(cluster._spec.model, REQUESTS, found)
        assert all(set(completion.weight_versions) == {step} for completion in found)


def test_each_engine_copies_from_its_rank_and_the_object_store_brings_the_same_bits(cluster):
    update_and_publish(cluster, 1)
    assert cluster._way == "ipc"
    copied = cluster.engine.generate(REQUESTS, params())
    cluster._engines.update(cluster._send)
    assert cluster.engine.generate(REQUESTS, params()) == copied


def test_an_engine_killed_while_it_copies_is_replaced_and_both_have_all_weights(cluster):
    victim, other = cluster._engines.members
    cluster.trainer.learn(groups_of(2), 2)
    kill_at(victim, "copying", lambda: cluster.publish(2))
    assert cluster._engines.num_restarts == 1 and cluster._engines.members[1] is other
    update_and_publish(cluster, 3)
    assert cluster._way == "ipc"


def test_memory_that_an_engine_cannot_open_is_sent_through_the_object_store_from_then_on(cluster, caplog):
    """Also where one engine has died idle before, and the other is killed while it receives."""

    def give_memory_of_another_gpu(rank: TrainerRank) -> None:
        share = SharedTensor.of
        SharedTensor.of = lambda tensor: replace(share(tensor), gpu="GPU-elsewhere")

    cluster.in_turn.call(give_memory_of_another_gpu, [(), ()])
    update_and_publish(cluster, 4)
    victim, idle = cluster._engines.members
    cluster.trainer.learn(groups_of(5), 5)
    os.kill(pid_of(idle), signal.SIGKILL)
    kill_at(victim, "received", lambda: cluster.publish(5))
    assert cluster._engines.num_restarts == 3
    assert_both_engines_have_the_weights(cluster, 5)
    (warning,) = [record.message for record in caplog.records if "object_store" in record.message]
    assert warning == (
        "weights go by object_store from now on, not by ipc: this process does not see GPU GPU-elsewhere"
    )

"""Real Ray, real DeepSpeed ranks, real vLLM: two ranks and two engines do what one process does.

Two clusters, each for a row of tests, which go through a run in order: start, first update, publish, the loss of
engines and of a rank (at a gate of `synthetic.gated_actors`), end. The first has ZeRO 3, untied embeddings and weights
through the object store; in the second, weights go by shared memory.
"""

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import pytest
import ray
import torch
from reference.gradient_case import relative_l2
from reference.ray_case import REQUESTS, groups_of, largest_gap, model_of, movement, params, spec_of
from support.installed import needs_vllm
from support.patience import PATIENCE_S, wait_until, wait_until_ended
from support.refusals import refused
from synthetic.gated_actors import GatedEngineActor, GatedRankActor
from synthetic.placed_kill import kill_at, pid_of

from luffy.cluster import ray_engine
from luffy.cluster.local import LocalCluster
from luffy.cluster.ray_cluster import RayCluster
from luffy.cluster.ray_session import Layout, Place, reserve
from luffy.cluster.supervision import MemberDied
from luffy.config.model import LoRAConfig
from luffy.errors import CheckpointError, ClusterError, ConfigError
from luffy.rollout.engine import Completion, RolloutRequest
from luffy.tensor_sharing import SharedTensor
from luffy.tracking.metrics import without_times
from luffy.training.learner import TrainerRank, TrainerSpec

pytestmark = [pytest.mark.slow, needs_vllm]
TESTS = Path(__file__).parents[1]
MAX_GAP = 1e-4
# The movement is 1e-3 of the parameters, so float32 rounding of the parameters shows in its fourth digit.
MAX_MOVEMENT_ERROR = 1e-3


@pytest.fixture(scope="module")
def gated() -> Iterator[None]:
    """Engines and ranks have gates."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(TESTS), prepend=os.pathsep)  # Ray's workers import the gated actors
        patch.setattr(ray_engine, "EngineActor", GatedEngineActor)
        patch.setattr(ray_engine, "RankActor", GatedRankActor)
        yield


@dataclass
class Pair:
    """The same start twice."""

    ray: RayCluster
    local: LocalCluster
    spec: TrainerSpec
    other: subprocess.Popen[bytes]
    """A process of somebody else, started while Ray started."""
    end: Callable[[], None]
    """Ends the cluster."""

    def export(self, name: str) -> Path:
        """The weights of the ranks, as a model folder."""
        folder = self.spec.out / name
        self.ray.trainer.export(folder)
        return folder

    def assert_weights_are(self, version: int) -> None:
        """Of the engine's answers, those that the ranks have."""
        completions = self.ray.engine.generate(REQUESTS, params())
        assert largest_gap(self.export(f"after_{version}"), REQUESTS, completions) < MAX_GAP
        assert all(set(completion.weight_versions) == {version} for completion in completions)


@pytest.fixture(scope="module")
def pair(tmp_path_factory, gated) -> Iterator[Pair]:
    ray_folder, local_folder = tmp_path_factory.mktemp("ray"), tmp_path_factory.mktemp("local")
    spec = spec_of(ray_folder, model_of(tied=False), zero_stage=3, trainer_ranks=2, engines=2)
    spec = replace(spec, execution=spec.execution.model_copy(update={"deterministic": True}))
    local = LocalCluster(spec_of(local_folder, model_of(tied=False), zero_stage=0))
    before = set(psutil.Process().children(recursive=True))
    others, init = [], ray.init

    def start_both(**options: object) -> object:
        others.append(subprocess.Popen(["sleep", "100000"]))
        return init(**options)

    with ExitStack() as stack:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ray, "init", start_both)
            cluster = stack.enter_context(RayCluster(spec))
        (other,) = others
        yield Pair(cluster, local, spec, other, stack.close)
    other.kill()
    wait_until_ended(set(psutil.Process().children(recursive=True)) - before)
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("later")]


def test_ranks_take_deterministic_kernels(pair):
    def found(_: TrainerRank) -> tuple[bool, str]:
        return torch.are_deterministic_algorithms_enabled(), os.environ["CUBLAS_WORKSPACE_CONFIG"]

    assert list(pair.ray.in_turn.call(found, [(), ()])) == [(True, ":4096:8")] * 2


def test_ranks_load_their_libraries_without_mlflow_collect_garbage_afterwards_and_are_as_nice_as_this_process(pair):
    found = pair.ray.in_turn.call(lambda rank: ("mlflow" in sys.modules, gc.isenabled(), os.nice(0)), [(), ()])
    assert list(found) == [(False, True, os.nice(0))] * 2


def test_engine_and_trainer_logprobs_agree_around_a_publish_and_the_update_equals_that_of_one_process(pair):
    first = pair.ray.engine.generate(REQUESTS, params())
    assert largest_gap(pair.export("start"), REQUESTS, first) < MAX_GAP

    found, expected = (cluster.trainer.learn(groups_of(1), 1) for cluster in (pair.ray, pair.local))
    assert without_times(found) == pytest.approx(without_times(expected), rel=1e-4, abs=1e-6)
    pair.local.trainer.export(pair.spec.out / "expected")
    after = pair.export("after")
    moved, expected_moved = (movement(folder, pair.spec.model) for folder in (after, pair.spec.out / "expected"))
    assert relative_l2(moved, expected_moved) < MAX_MOVEMENT_ERROR

    pair.ray.publish(1)
    second = pair.ray.engine.generate(REQUESTS, params())
    assert largest_gap(after, REQUESTS, second) < MAX_GAP < largest_gap(pair.spec.model, REQUESTS, second)
    assert all(set(c.weight_versions) == {1} for c in second)


def test_rollouts_continue_after_a_publish_and_their_tokens_carry_its_version(pair):
    requests = [RolloutRequest((1 + i % 20, 2), seed=i) for i in range(200)]
    completions: list[Completion] = []
    num_calls, began_s, took_s, published = 0, 0.0, 0.0, threading.Event()

    def generate_until_published() -> None:
        nonlocal num_calls, began_s, took_s
        while not published.is_set():
            began_s = time.monotonic()
            completions.extend(pair.ray.engine.generate(requests, params()))
            took_s = time.monotonic() - began_s
            num_calls += 1

    later = threading.Thread(target=generate_until_published, name="later", daemon=True)
    later.start()
    pair.ray.trainer.learn(groups_of(2), 2)
    pair.ray.trainer.learn(groups_of(3), 3)
    wait_until(lambda: num_calls > 0 and time.monotonic() - began_s > took_s / 2)  # in the middle of a call
    pair.ray.publish(3)
    calls_before = num_calls
    wait_until(lambda: num_calls > calls_before + 1)
    published.set()
    later.join(timeout=PATIENCE_S)
    assert len(completions) == num_calls * len(requests)
    versions = [c.weight_versions for c in completions]
    assert all(list(row) == sorted(row) and set(row) <= {1, 3} for row in versions)
    assert any(len(set(row)) == 2 for row in versions)
    assert any(set(row) == {3} for row in versions)


def test_a_step_without_a_group_has_its_own_version(pair):
    assert pair.ray.trainer.learn([], 4) == {"batch/optimizer_steps": 0.0}
    pair.ray.publish(4)
    assert set(pair.ray.engine.generate(REQUESTS[:1], params())[0].weight_versions) == {4}


def test_an_engine_killed_while_it_receives_is_replaced_and_the_other_gets_all_weights(pair):
    victim, other = pair.ray._engines.members
    pair.ray.trainer.learn(groups_of(5), 5)
    kill_at(victim, "received", lambda: pair.ray.publish(5))
    assert pair.ray._engines.num_restarts == 1 and pair.ray._engines.members[1] is other
    pair.assert_weights_are(5)
    # The replacement takes part in the next update.
    pair.ray.trainer.learn(groups_of(6), 6)
    pair.ray.publish(6)
    pair.assert_weights_are(6)


def test_an_engine_killed_while_generating_is_replaced_and_every_request_is_answered_once(pair):
    requests = [RolloutRequest((1 + i % 20, 2), seed=i) for i in range(150)]
    victim = pair.ray._engines.members[1]
    completions = kill_at(victim, "answered", lambda: pair.ray.engine.generate(requests, params()))
    assert len(completions) == len(requests)
    assert largest_gap(pair.export("unchanged"), requests, completions) < MAX_GAP
    assert all(set(c.weight_versions) == {6} for c in completions)
    assert pair.ray._engines.num_restarts == 2
    # Its draws are those that the first engine would have made.
    again = pair.ray.engine.generate(requests[:5], params())
    assert [c.token_ids for c in again] == [c.token_ids for c in completions[:5]]


def test_an_error_of_the_ranks_is_raised_as_it_is(pair):
    with pytest.raises(CheckpointError, match="is not a complete checkpoint"):
        pair.ray.trainer.restore(9)
    with pytest.raises(ClusterError, match=r"trainer rank [01] failed: .*'NoneType'.*rank_[01]\.log"):
        pair.ray.in_turn.call(TrainerRank.entropies, [(None,), (None,)])


def test_a_layout_larger_than_the_cluster_is_refused(pair):
    one = [Place(0, cpus=1, gpus=0)]
    with refused("trainer_ranks 1", "engines 1", "3 GPUs", error=ConfigError):
        reserve(Layout([{"CPU": 1, "GPU": 1}, {"CPU": 1, "GPU": 2}], one, one), 5)
    with refused("trainer_ranks 1000", "engines 1", "1001 CPUs", error=ConfigError):
        reserve(Layout([{"CPU": 1}] * 1001, one * 1000, one), 5)
    everything = ray.cluster_resources()["CPU"]
    with pytest.raises(ClusterError, match=r"CPUs did not become free within 1 s"):
        reserve(Layout([{"CPU": everything}], one, []), 1)


def test_a_rank_killed_while_it_learns_is_named(pair):
    (_, victim) = pair.ray._ranks.members
    with pytest.raises(MemberDied, match=r"trainer rank 1 died; .*The end of .*rank_1\.log") as caught:
        kill_at(victim, "learn", lambda: pair.ray.trainer.learn(groups_of(7), 7))
    assert caught.value.member is victim
    with pytest.raises(MemberDied, match="trainer rank 1 died"):
        pair.ray.trainer.learn(groups_of(7), 7)


def test_a_process_that_another_thread_starts_while_ray_starts_outlives_ray(pair):
    """The last test: it ends the cluster."""
    pair.end()
    assert not ray.is_initialized()
    for thread in threading.enumerate():
        if thread.name == "ray-end":  # it kills what Ray has started
            thread.join(PATIENCE_S)
    assert pair.other.poll() is None


# Engines on the ranks' GPUs


@pytest.fixture(scope="module", params=["merged", "separate"])
def colocated(request, tmp_path_factory, gated) -> Iterator[RayCluster]:
    """Engines copy from the memory of the rank beside them, on CPUs by the calls that share a GPU's memory.

    Published are a LoRA adapter alone, or all weights with it merged.
    """
    spec = spec_of(
        tmp_path_factory.mktemp("ray"), model_of(tied=True), zero_stage=3,
        lora=LoRAConfig(rank=4, alpha=8.0),
        trainer_ranks=2, engines=2, placement="colocated",
    )  # fmt: skip
    vllm = spec.execution.vllm.model_copy(update={"adapter": request.param})
    with RayCluster(replace(spec, execution=spec.execution.model_copy(update={"vllm": vllm}))) as cluster:
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


def test_each_engine_copies_from_its_rank_and_the_object_store_brings_the_same_bits(colocated):
    update_and_publish(colocated, 1)
    assert colocated._way == "ipc"
    copied = colocated.engine.generate(REQUESTS, params())
    colocated._engines.update(colocated._send)
    assert colocated.engine.generate(REQUESTS, params()) == copied


def test_an_engine_killed_while_it_copies_is_replaced_and_both_have_all_weights(colocated):
    victim, other = colocated._engines.members
    colocated.trainer.learn(groups_of(2), 2)
    kill_at(victim, "copying", lambda: colocated.publish(2))
    assert colocated._engines.num_restarts == 1 and colocated._engines.members[1] is other
    update_and_publish(colocated, 3)
    assert colocated._way == "ipc"


@pytest.mark.parametrize("colocated", ["merged"], indirect=True)
def test_memory_that_an_engine_cannot_open_is_sent_through_the_object_store_from_then_on(colocated, caplog):
    """Also where one engine has died idle before, and the other is killed while it receives."""

    def give_memory_of_another_gpu(rank: TrainerRank) -> None:
        share = SharedTensor.of
        SharedTensor.of = lambda tensor: replace(share(tensor), gpu="GPU-elsewhere")

    colocated.in_turn.call(give_memory_of_another_gpu, [(), ()])
    update_and_publish(colocated, 4)
    victim, idle = colocated._engines.members
    colocated.trainer.learn(groups_of(5), 5)
    os.kill(pid_of(idle), signal.SIGKILL)
    kill_at(victim, "received", lambda: colocated.publish(5))
    assert colocated._engines.num_restarts == 3
    assert_both_engines_have_the_weights(colocated, 5)
    (warning,) = [record.message for record in caplog.records if "object_store" in record.message]
    assert warning == (
        "weights go by object_store from now on, not by ipc: this process does not see GPU GPU-elsewhere"
    )

"""Engines, ranks and Ray itself killed (`kill -9`), on a cluster that was there before and must be there afterwards.

The tests share a cluster (ZeRO 2, tied embeddings) as long as all of its processes live; after a fault that ends a run,
or a test that failed, the next test starts another. Every fault is placed by a gate (`synthetic.gated_actors`).
"""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import pytest
import ray
from installed import needs_vllm
from patience import PATIENCE_S, wait_until
from ray.exceptions import RayError
from reference.ray_case import REQUESTS, groups_of, largest_gap, model_of, params, spec_of
from synthetic.gated_actors import GatedEngineActor, GatedRankActor
from synthetic.placed_kill import kill_at, pid_of

from luffy.cluster import ray_engine
from luffy.cluster.ray_cluster import RayCluster
from luffy.cluster.supervision import Member, MemberDied
from luffy.errors import ConfigError
from luffy.rollout.engine import RolloutRequest
from luffy.training.learner import TrainerSpec

pytestmark = [pytest.mark.slow, needs_vllm]
TESTS = Path(__file__).parents[1]
MAX_GAP = 1e-4
NUM_CPUS = 4


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Address of a cluster that somebody else has started on this machine."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [str(Path(sys.executable).with_name("ray")), "start", "--head", "--block", "--disable-usage-stats"]
    layout = [f"--port={port}", f"--num-cpus={NUM_CPUS}", "--num-gpus=0", "--include-dashboard=false"]
    head = subprocess.Popen(
        [*command, *layout],
        # Both sides want a token or none; a Ray that this process has started before has settled it.
        # Its workers import the gated actors.
        env={"RAY_AUTH_MODE": "disabled", **os.environ, "PYTHONPATH": str(TESTS)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    processes: list[psutil.Process] = []
    try:
        wait_until(lambda: listens(port), "Ray's head")
        yield f"127.0.0.1:{port}"
        assert head.poll() is None
    finally:
        processes = psutil.Process(head.pid).children(recursive=True)
        head.terminate()
        head.wait(timeout=PATIENCE_S)
        for process in psutil.wait_procs(processes, timeout=10)[1]:
            process.kill()


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def assert_all_cpus_become_free(address: str) -> None:
    """All of the cluster's CPUs are free again, as somebody else sees it."""
    ray.init(address=address, log_to_driver=False)
    try:
        wait_until(lambda: ray.available_resources().get("CPU", 0) == NUM_CPUS, "the return of all CPUs")
    finally:
        ray.shutdown()


@pytest.mark.parametrize("answers", [False, True], ids=["nobody listens", "no Ray"])
def test_an_address_without_a_cluster_is_refused_at_once(tmp_path, answers):
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        if answers:
            server.listen()
        spec = spec_of(tmp_path, model_of(tied=True), 0, address=f"127.0.0.1:{server.getsockname()[1]}")
        # Ray itself, which tries for a minute, is not asked: its error would read "cannot join the Ray cluster".
        refusal = r"^execution\.ray\.address: no Ray cluster answers"
        with pytest.raises(ConfigError, match=refusal) as caught, RayCluster(spec):
            pass
    assert "\n" not in str(caught.value)


def test_a_start_that_fails_half_way_releases_everything(address, tmp_path):
    # The rank takes it. The engine finds out by itself, before it loads vLLM.
    spec = spec_of(tmp_path, model_of(tied=True), zero_stage=0, address=address)
    vllm = spec.execution.vllm.model_copy(update={"max_num_batched_tokens": 8})
    spec = replace(spec, execution=spec.execution.model_copy(update={"vllm": vllm}))
    refusal = r"execution\.vllm\.max_num_batched_tokens: 8 is less than one sequence of 64 tokens"
    with pytest.raises(ConfigError, match=refusal), RayCluster(spec):
        pass
    assert not ray.is_initialized()
    assert_all_cpus_become_free(address)


@dataclass
class Running:
    cluster: RayCluster
    spec: TrainerSpec
    version: int = 0
    """Of the weights that were published last."""

    @property
    def members(self) -> list[Member]:
        return [*self.cluster._engines.members, *self.cluster._ranks.members]

    @property
    def engine_member(self) -> Member:
        (member,) = self.cluster._engines.members
        return member

    def is_alive(self) -> bool:
        try:
            ray.get([member.handle.pid.remote() for member in self.members], timeout=PATIENCE_S)
        except RayError:
            return False
        return True

    def learn(self) -> int:
        """Take a step that is not published yet; returns its version."""
        self.cluster.trainer.learn(groups_of(self.version + 1), self.version + 1)
        return self.version + 1

    def publish(self, version: int) -> None:
        self.cluster.publish(version)
        self.version = version

    def largest_gap(self) -> float:
        """Between the engine's present log-probabilities and those of the trainer's weights."""
        return largest_gap(self.export(), REQUESTS, self.cluster.engine.generate(REQUESTS, params()))

    def export(self) -> Path:
        folder = self.spec.out / "now"
        self.cluster.trainer.export(folder)
        return folder


def kill(member: Member) -> None:
    """Kill its process and wait for its end."""
    process = psutil.Process(pid_of(member))
    process.kill()
    wait_until(
        lambda: not process.is_running() or process.status() == psutil.STATUS_ZOMBIE, f"the end of {member.name}"
    )


class SharedCluster:
    """One cluster for all tests that leave it whole."""

    def __init__(self, address: str, folders: pytest.TempPathFactory) -> None:
        self._address = address
        self._folders = folders
        self._stack = ExitStack()
        self._running: Running | None = None

    def get(self) -> Running:
        if self._running is None or not self._running.is_alive():
            self.close()
            self._running = self._start()
        return self._running

    def close(self) -> None:
        self._running = None
        self._stack.close()

    def _start(self) -> Running:
        folder = self._folders.mktemp("ray")
        spec = spec_of(folder, model_of(tied=True), zero_stage=2, trainer_ranks=2, engines=1, address=self._address)
        return Running(self._stack.enter_context(RayCluster(spec)), spec)


@pytest.fixture(scope="module")
def shared(address, tmp_path_factory) -> Iterator[SharedCluster]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ray_engine, "EngineActor", GatedEngineActor)
        patch.setattr(ray_engine, "RankActor", GatedRankActor)
        shared = SharedCluster(address, tmp_path_factory)
        yield shared
        shared.close()
    assert_all_cpus_become_free(address)


@pytest.fixture
def running(shared) -> Running:
    return shared.get()


def test_an_engine_killed_while_generating_is_replaced_and_every_request_is_answered_once(running):
    engine, restarts = running.cluster._engines, running.cluster._engines.num_restarts
    requests = [RolloutRequest((1 + i % 20, 2), seed=i) for i in range(150)]
    completions = kill_at(running.engine_member, "answered", lambda: engine.generate(requests, params()))
    assert len(completions) == len(requests)
    assert largest_gap(running.export(), requests, completions) < MAX_GAP
    assert all(set(c.weight_versions) == {running.version} for c in completions)
    assert engine.num_restarts == restarts + 1
    # Its draws are those that the first engine would have made.
    assert [c.token_ids for c in engine.generate(requests[:5], params())] == [c.token_ids for c in completions[:5]]


@pytest.mark.parametrize("idle", [False, True])
def test_an_engine_killed_during_or_before_a_publish_has_the_new_weights_afterwards(running, idle):
    engine, restarts = running.cluster._engines, running.cluster._engines.num_restarts
    version = running.learn()
    if idle:
        kill(running.engine_member)
        running.publish(version)
    else:
        kill_at(running.engine_member, "received", lambda: running.publish(version))
    assert engine.num_restarts == restarts + 1
    assert running.largest_gap() < MAX_GAP
    assert set(engine.generate(REQUESTS[:1], params())[0].weight_versions) == {version}


def test_a_rank_killed_while_it_learns_is_named(running):
    (_, victim) = running.cluster._ranks.members
    with pytest.raises(MemberDied, match=r"trainer rank 1 died; .*The end of .*rank_1\.log") as caught:
        kill_at(victim, "learn", running.learn)
    assert caught.value.member is victim
    with pytest.raises(MemberDied, match="trainer rank 1 died"):
        running.learn()

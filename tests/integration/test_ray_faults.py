"""Engines, ranks and Ray itself killed (`kill -9`), on a cluster that was there before and must be there afterwards.

One cluster, ZeRO 2 and tied embeddings, for the tests that go on behind a fault; its last test ends it.
"""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import ray
from reference.ray_case import REQUESTS, groups_of, largest_gap, model_of, params, spec_of

from luffy.cluster.ray_cluster import RayCluster
from luffy.cluster.supervision import Member, MemberDied
from luffy.errors import ConfigError
from luffy.rollout.engine import RolloutRequest
from luffy.training.trainer import TrainerSpec

pytestmark = pytest.mark.slow
MAX_GAP = 1e-4
NUM_CPUS = 4


def wait_until(condition: Callable[[], object], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.1)


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Of a cluster that somebody else has started on this machine."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [str(Path(sys.executable).with_name("ray")), "start", "--head", "--block", "--disable-usage-stats"]
    layout = [f"--port={port}", f"--num-cpus={NUM_CPUS}", "--num-gpus=0", "--include-dashboard=false"]
    head = subprocess.Popen(
        [*command, *layout],
        # Both sides want a token or none; a Ray that this process has started before has settled it.
        env={"RAY_AUTH_MODE": "disabled", **os.environ},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    processes: list[psutil.Process] = []
    try:
        wait_until(lambda: listens(port), timeout_s=60)
        yield f"127.0.0.1:{port}"
        assert head.poll() is None
    finally:
        processes = psutil.Process(head.pid).children(recursive=True)
        head.terminate()
        head.wait(timeout=30)
        for process in psutil.wait_procs(processes, timeout=10)[1]:
            process.kill()


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def free_cpus(address: str) -> float:
    """Of the cluster, as somebody else sees it."""
    ray.init(address=address, log_to_driver=False)
    try:
        deadline = time.monotonic() + 20
        while ray.available_resources().get("CPU", 0) < NUM_CPUS and time.monotonic() < deadline:
            time.sleep(0.2)
        return ray.available_resources().get("CPU", 0)
    finally:
        ray.shutdown()


@pytest.mark.parametrize("answers", [False, True], ids=["nobody listens", "no Ray"])
def test_an_address_without_a_cluster_is_refused_at_once(tmp_path: Path, answers: bool) -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        if answers:
            server.listen()
        spec = spec_of(tmp_path, model_of(tied=True), 0, address=f"127.0.0.1:{server.getsockname()[1]}")
        began = time.monotonic()
        with pytest.raises(ConfigError, match=r"^execution\.ray\.address: ") as caught, RayCluster(spec):
            pass
    assert "\n" not in str(caught.value)
    assert time.monotonic() - began < 10


def test_a_start_that_fails_half_way_gives_everything_back(address: str, tmp_path: Path) -> None:
    # The ranks take it, vLLM has no attention of 16 dimensions a head.
    spec = spec_of(tmp_path, model_of(tied=True, num_heads=4), zero_stage=0, address=address)
    with pytest.raises(ConfigError, match="vLLM has no attention of 16 dimensions"), RayCluster(spec):
        pass
    assert not ray.is_initialized()
    assert free_cpus(address) == NUM_CPUS


@dataclass
class Running:
    cluster: RayCluster
    spec: TrainerSpec
    address: str

    def kill(self, member: Member, frozen: bool = False) -> int:
        """Kill its process now; `frozen`: first stop it, so that whatever is asked of it next finds it silent."""
        pid: int = ray.get(member.handle.pid.remote(), timeout=60)
        os.kill(pid, signal.SIGSTOP if frozen else signal.SIGKILL)
        return pid

    def largest_gap(self) -> float:
        """Between the engine's present log-probabilities and those of the trainer's weights."""
        folder = self.spec.out / "now"
        self.cluster.trainer.export(folder)
        return largest_gap(folder, REQUESTS, self.cluster.engine.generate(REQUESTS, params()))


@pytest.fixture(scope="module")
def running(address: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("ray")
    spec = spec_of(folder, model_of(tied=True), zero_stage=2, trainer_ranks=2, engines=1, address=address)
    with RayCluster(spec) as cluster:
        yield Running(cluster, spec, address)
    assert free_cpus(address) == NUM_CPUS


def test_logprobs_agree_before_and_after_a_publish(running: Running) -> None:
    assert running.largest_gap() < MAX_GAP
    running.cluster.trainer.learn(groups_of(1), 1)
    running.cluster.publish(1)
    assert running.largest_gap() < MAX_GAP


def test_an_engine_killed_in_mid_generate_is_replaced_and_every_request_is_answered_once(running: Running) -> None:
    engine = running.cluster.engine
    (victim,) = engine.members
    pid: int = ray.get(victim.handle.pid.remote())
    requests = [RolloutRequest((1 + i % 20, 2), seed=i) for i in range(150)]
    with ThreadPoolExecutor(1) as threads:
        later = threads.submit(engine.generate, requests, params())
        time.sleep(0.4)
        os.kill(pid, signal.SIGKILL)
        completions = later.result(timeout=150)
    assert len(completions) == len(requests)
    assert largest_gap(running.spec.out / "now", requests, completions) < MAX_GAP
    assert all(set(c.weight_versions) == {1} for c in completions)
    assert engine.num_restarts == 1
    # Its draws are those that the first engine would have made.
    assert [c.token_ids for c in engine.generate(requests[:5], params())] == [c.token_ids for c in completions[:5]]


def test_an_engine_killed_during_a_publish_has_the_weights_behind_it(running: Running) -> None:
    cluster = running.cluster
    cluster.trainer.learn(groups_of(2), 2)
    pid = running.kill(cluster.engine.members[0], frozen=True)
    with ThreadPoolExecutor(1) as threads:
        publishing = threads.submit(cluster.publish, 2)
        time.sleep(1)
        assert not publishing.done()
        os.kill(pid, signal.SIGKILL)
        publishing.result(timeout=150)
    assert cluster.engine.num_restarts == 2
    assert running.largest_gap() < MAX_GAP
    assert set(cluster.engine.generate(REQUESTS[:1], params())[0].weight_versions) == {2}


def test_a_rank_killed_while_it_learns_is_named(running: Running) -> None:
    """The last test of the cluster: its trainer is gone."""
    (_, victim), began = running.cluster._ranks, time.monotonic()
    pid = running.kill(victim, frozen=True)
    with ThreadPoolExecutor(1) as threads:
        learning = threads.submit(running.cluster.trainer.learn, groups_of(3), 3)
        time.sleep(1)
        assert not learning.done()
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(MemberDied, match=r"trainer rank 1 died; .*The end of .*rank_1\.log") as caught:
            learning.result(timeout=60)
    assert caught.value.member is victim
    assert time.monotonic() - began < 60
    with pytest.raises(MemberDied, match="trainer rank 1 died"):
        running.cluster.trainer.learn(groups_of(3), 3)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("later")]

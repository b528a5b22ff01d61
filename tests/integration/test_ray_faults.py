"""Ray clusters that cannot be joined, and one that was there before and is whole after a start that failed.

A file of its own, since a process is in one cluster at a time. `test_two_machines` loses a part of such a cluster.
"""

import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import ray
from reference.ray_case import model_of, spec_of
from support.installed import needs_vllm
from support.patience import PATIENCE_S, wait_until
from support.refusals import refused

from luffy.cluster.ray_cluster import RayCluster
from luffy.errors import ConfigError
from luffy.flows.prefect_api import free_port

pytestmark = [pytest.mark.slow, needs_vllm]
NUM_CPUS = 4


@pytest.mark.parametrize("answers", [False, True], ids=["nobody listens", "no Ray"])
def test_an_address_without_a_cluster_is_refused_at_once(tmp_path, answers):
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        if answers:
            server.listen()
        spec = spec_of(tmp_path, model_of(tied=True), 0, address=f"127.0.0.1:{server.getsockname()[1]}")
        # Ray itself, which tries for a minute, is not asked: its error would read "cannot join the Ray cluster".
        with refused("execution.ray.address", "no Ray cluster answers", error=ConfigError), RayCluster(spec):
            pass


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_a_start_that_fails_half_way_releases_everything(tmp_path):
    command = [str(Path(sys.executable).with_name("ray")), "start", "--head", "--block", "--disable-usage-stats"]
    layout = [f"--port={(port := free_port())}", f"--num-cpus={NUM_CPUS}", "--num-gpus=0", "--include-dashboard=false"]
    # Both sides want a token or none; a Ray that this process has started before has settled it.
    environment = {"RAY_AUTH_MODE": "disabled", **os.environ}
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    head = subprocess.Popen([*command, *layout], env=environment, **quiet)
    try:
        wait_until(lambda: listens(port), "Ray's head")
        # The rank takes it. The engine finds out by itself, before it loads vLLM.
        spec = spec_of(tmp_path, model_of(tied=True), zero_stage=0, address=f"127.0.0.1:{port}")
        vllm = spec.execution.vllm.model_copy(update={"max_num_batched_tokens": 8})
        spec = replace(spec, execution=spec.execution.model_copy(update={"vllm": vllm}))
        named = ("execution.vllm.max_num_batched_tokens", "8", "64")
        with refused(*named, error=ConfigError), RayCluster(spec):
            pass
        assert not ray.is_initialized()
        ray.init(address=f"127.0.0.1:{port}", log_to_driver=False)  # as somebody else sees it
        try:
            wait_until(lambda: ray.available_resources().get("CPU", 0) == NUM_CPUS, "the return of all CPUs")
        finally:
            ray.shutdown()
        assert head.poll() is None
    finally:
        processes = psutil.Process(head.pid).children(recursive=True)
        head.terminate()
        head.wait(timeout=PATIENCE_S)
        for process in psutil.wait_procs(processes, timeout=10)[1]:
            process.kill()

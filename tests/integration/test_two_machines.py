"""RL on a Ray cluster of two machines, of which one fails in the middle of a step; a Slurm job that forms a cluster.

What one machine computes is the reference. The machines are on this host: each has a network, files in /tmp, a host
name and processes of its own.
"""

import os
import re
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import pytest
from support.holding import Hold
from support.installed import needs_no_gpu, needs_vllm
from support.patience import PATIENCE_S, ran, wait_until, wait_until_ended
from support.prefect_api import place_empty_database, without_prefect
from support.stages import ROOT, assert_same_result, only, opened
from toy_run import Recorder

from luffy.pipeline.experiment import ExperimentRun
from luffy.pipeline.manifest import finished_manifest

pytestmark = [pytest.mark.slow, needs_vllm, needs_no_gpu]
RAY = Path(sys.executable).with_name("ray")
NAMESPACES = ["unshare", "--net", "--mount", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"]
# Ends with the pipe at its standard input, so with whoever has started it, and all of the machine's processes with it.
# The names are those of a Debian installation, which lead nowhere from the other machine.
BOOT = """
set -e
hostname "$0"
mount -t tmpfs tmpfs /mnt
number=0
for folder in "$@"; do
  number=$((number + 1)); mkdir "/mnt/$number"; mount --bind "$folder" "/mnt/$number"
done
mount -t tmpfs tmpfs /tmp
mount -t tmpfs tmpfs /dev/shm
number=0
for folder in "$@"; do
  number=$((number + 1)); mkdir -p "$folder"; mount --bind "/mnt/$number" "$folder"
done
printf '127.0.0.1 localhost\\n127.0.1.1 %s\\n' "$0" > /tmp/hosts
mount --bind /tmp/hosts /etc/hosts
ip link set lo up
echo ready
exec cat > /dev/null
"""
SWITCH = "ip link add eth0 type bridge"
NETWORK = """
set -e
{first}
ip addr add {address}/24 dev eth0
ip link set eth0 up
ip route add default dev eth0
"""
LUFFY = Path(sys.executable).with_name("luffy")
SLURM = ROOT / "deploy" / "slurm.sh"
NUM_STEPS, HELD_AT = 4, 3
EXPERIMENT = ("smoke_ray", "stages=[prepare_data, base, rl]", f"rl.steps={NUM_STEPS}", "rl.max_staleness=0")
TIMES = "start_timeout_s: 600, call_timeout_s: 600"
SRUN = """#!/usr/bin/env bash
env -0 > "$SEEN/environment"
printf '%s\\n' "$@" > "$SEEN/words" && mv "$SEEN/words" "$SEEN/asked"
exec sleep infinity > /dev/null 2>&1
"""


class Machine:
    """Runs until `kill`, or until this process ends. Sees the folder `shared`, and this checkout, as this host does."""

    def __init__(self, name: str, address: str, shared: Path) -> None:
        self.name, self.address = name, address
        self.environment = {**os.environ}
        folders = dict.fromkeys([str(ROOT), sys.prefix, str(shared)])
        self._boot = subprocess.Popen(
            [*NAMESPACES, "sh", "-c", BOOT, name, *folders], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self._boot.stdout is not None and self._boot.stdout.readline() == b"ready\n"
        (self._first,) = psutil.Process(self._boot.pid).children()

    @property
    def pid(self) -> int:
        return self._first.pid

    def command(self, *words: object) -> list[str]:
        """The command, on this machine and in this checkout."""
        inside = ["nsenter", f"--target={self.pid}", "--net", "--mount", "--uts", "--pid", f"--wdns={ROOT}", "--"]
        return [*inside, *map(str, words)]

    def run(self, *words: object, **environment: str) -> subprocess.CompletedProcess[str]:
        return ran(self.command(*words), env={**self.environment, **environment})

    def start(self, *words: object, **environment: str) -> subprocess.Popen[str]:
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        return subprocess.Popen(self.command(*words), env={**self.environment, **environment}, **options)

    def start_ray(self, *words: str) -> None:
        started = self.run(RAY, "start", *words, "--num-cpus=2", "--num-gpus=0", "--object-store-memory=80000000")
        assert started.returncode == 0, started.stdout + started.stderr

    def kill(self) -> None:
        """As if its power had failed: `kill -9` of everything, and its network is gone."""
        processes = self._first.children(recursive=True) if self._first.is_running() else []
        self._boot.kill()
        self._boot.wait(timeout=PATIENCE_S)
        wait_until_ended([self._first, *processes])


class TwoMachines:
    """`alpha`, and `beta`, once it is started, behind one switch."""

    def __init__(self, shared: Path) -> None:
        self.shared = shared
        self.alpha = Machine("alpha", "10.77.0.1", shared)
        connect(self.alpha, SWITCH)
        self.beta: Machine | None = None
        self.address = f"{self.alpha.address}:6379"
        # As Ray's head has it by default where other machines may reach it; its token is a file, which both share here.
        self.alpha.environment |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(16)}

    def start_beta(self) -> Machine:
        self.beta = Machine("beta", "10.77.0.2", self.shared)
        self.beta.environment = self.alpha.environment
        pids = [str(self.alpha.pid), "type", "veth", "peer", "name", "eth0", "netns", str(self.beta.pid)]
        succeed(["ip", "link", "add", "port", "netns", *pids])
        succeed(self.alpha.command("sh", "-c", "ip link set port master eth0 && ip link set port up"))
        connect(self.beta)
        return self.beta

    def start_ray(self) -> None:
        self.alpha.start_ray("--head", "--port=6379", "--include-dashboard=false", "--disable-usage-stats")

    def join_ray(self) -> None:
        self.start_beta().start_ray(f"--address={self.address}")

    def close(self) -> None:
        for machine in (self.alpha, self.beta):
            if machine is not None:
                machine.kill()


def succeed(command: list[str]) -> None:
    done = ran(command)
    assert done.returncode == 0, done.stderr


def connect(machine: Machine, first: str = "true") -> None:
    succeed(machine.command("sh", "-c", NETWORK.format(first=first, address=machine.address)))


@contextmanager
def two_machines(shared: Path) -> Iterator[TwoMachines]:
    """Skips the test where such machines cannot be made."""
    missing = [name for name in ("unshare", "nsenter", "ip") if shutil.which(name) is None]
    probe = ["unshare", "--net", "--mount", "--uts", "--pid", "--fork", "sh", "-c"]
    devices = "mount -t tmpfs tmpfs /mnt && ip link add one type bridge && ip link add two type veth peer name three"
    if missing or ran([*probe, devices]).returncode:
        pytest.skip(f"needs {', '.join(missing) or 'leave to make network namespaces: run as root'}")
    with ExitStack() as stack:
        machines = TwoMachines(shared)
        stack.callback(machines.close)
        yield machines


def test_the_loss_of_a_machine_is_named_and_the_same_command_goes_on_when_it_is_back(tmp_path, monkeypatch, request):
    """Ranks are on both, and weights go to the other machine.

    The machine that was not Ray's head goes on. In the end every bit is as on one machine.
    """
    with two_machines(tmp_path) as machines:
        workspace, reference = tmp_path / "workspace", tmp_path / "reference"
        place_empty_database(workspace / "prefect")
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
        request.getfixturevalue("warm_stages")  # only now, since a warm server starts no stage in another environment
        config, *of_experiment = EXPERIMENT
        for nodes, changed in (
            (("prepare_data", "base"), "cluster=local"), (("rl",), f"execution.ray={{trainer_ranks: 3, {TIMES}}}"),
        ):  # fmt: skip
            experiment = opened(workspace, f"{config}.yaml", *of_experiment, changed)
            run_here = ExperimentRun(experiment, experiment.workspace.new_run("alone", {}))
            for node in nodes:
                run_here.execute(node, Recorder())
        only(workspace / "stages", "rl").rename(reference)

        environment = machines.alpha.environment
        environment |= {"DO_NOT_TRACK": "1", "OMP_NUM_THREADS": "1"}
        for name in environment.keys() - without_prefect().keys():
            if name.startswith("PREFECT_"):
                del environment[name]
        environment.pop("VLLM_CACHE_ROOT", None)  # so in the workspace, which both machines see
        machines.start_ray()
        machines.join_ray()
        ray = f'address: "{machines.address}", trainer_ranks: 3, {TIMES}'
        words = [LUFFY, "run", *EXPERIMENT, f"execution.ray={{{ray}}}", "--workspace", workspace]
        hold = Hold(workspace, "rl", HELD_AT)
        run = machines.alpha.start(*words, **hold.environment)
        hold.wait(run)
        for process in psutil.Process(machines.beta.pid).children(recursive=True):
            if "ray::RankActor" in process.name():
                process.suspend()  # so that nobody gets through the step that begins now
        hold.release()
        machines.beta.kill()
        out, _ = run.communicate(timeout=PATIENCE_S)
        assert run.returncode == 1
        lost = r"machine beta \(10\.77\.0\.2\) is gone, and with it (.*); the same command resumes the stage"
        told = re.search(rf"error: rl failed with exit code 75: {lost}", out)
        assert told, out
        gone = {*told[1].split(", ")}
        assert len(gone) == 2 and gone < {"engine 0", *(f"trainer rank {rank}" for rank in range(3))}
        assert len(gone & {"engine 0", "trainer rank 0"}) == 1, "the rank that sends and the engine were on one machine"

        refused = machines.alpha.run(*words, **hold.environment)
        assert refused.returncode == 2
        few = "trainer_ranks 3 and engines 1 need 4 CPUs, the cluster has 2; gone: machine beta (10.77.0.2)"
        assert few in refused.stderr

        machines.join_ray()
        run = machines.beta.run(*words, **hold.environment)
        assert run.returncode == 0, run.stdout + run.stderr
    found = only(workspace / "stages", "rl")
    assert finished_manifest(found).resumed_from == HELD_AT - 1
    assert_same_result(found, reference)


def test_a_slurm_job_of_two_nodes_makes_one_cluster(tmp_path):
    """`luffy run` is replaced by `luffy plan`, which finds the cluster."""
    seen = tmp_path / "seen"
    seen.mkdir()
    plan = f'#!/bin/sh\nshift\nexec {LUFFY} plan "$@" --workspace {tmp_path}/workspace\n'
    for name, text in (("srun", SRUN), ("luffy", plan)):
        (seen / name).write_text(text)
        (seen / name).chmod(0o755)
    with two_machines(tmp_path) as machines:
        beta = machines.start_beta()
        job = machines.alpha.start(
            SLURM,
            *EXPERIMENT,
            f"execution.ray={{trainer_ranks: 2, engines: 2, {TIMES}}}",
            SEEN=str(seen),
            PATH=os.pathsep.join([str(seen), str(LUFFY.parent), os.environ["PATH"]]),
            SLURM_JOB_ID="17",
            SLURM_JOB_NUM_NODES="2",
            SLURMD_NODENAME="alpha",
        )
        wait_until(lambda: (seen / "asked").exists() or job.poll() is not None, "srun")
        words = (seen / "asked").read_text().split()
        assert {"--nodes=1", "--ntasks=1", "--exclude=alpha"} <= {*words}
        exported = dict(entry.split("=", 1) for entry in (seen / "environment").read_text().split("\0") if "=" in entry)
        node = beta.start(*words[words.index("ray") :], **exported)
        out, _ = job.communicate(timeout=PATIENCE_S)
        assert job.returncode == 0, out
        assert node.poll() is None
    assert re.search(r"4 GPUs needed on the Ray cluster at [\d.]+:\d+, or as many CPUs", out), out

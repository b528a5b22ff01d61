"""Two machines on this host: each with a network, files in /tmp, a host name and processes of its own."""

import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import pytest
from support.patience import PATIENCE_S, ran, wait_until_ended

_ROOT = Path(__file__).parents[2]
_RAY = Path(sys.executable).with_name("ray")
_NAMESPACES = ["unshare", "--net", "--mount", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"]
# Ends with the pipe at its standard input, so with whoever has started it, and all of the machine's processes with it.
# The names are those of a Debian installation, which lead nowhere from the other machine.
_BOOT = """
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
_SWITCH = """
set -e
ip link add eth0 type bridge
ip addr add {address}/24 dev eth0
ip link set eth0 up
ip route add default dev eth0
"""
_CABLE = """
set -e
ip addr add {address}/24 dev eth0
ip link set eth0 up
ip route add default dev eth0
"""


class Machine:
    """Runs until `kill`, or until this process ends. Sees the folder `shared`, and this checkout, as this host does."""

    def __init__(self, name: str, address: str, shared: Path) -> None:
        self.name, self.address = name, address
        self.environment = {**os.environ}
        folders = dict.fromkeys([str(_ROOT), sys.prefix, str(shared)])
        self._boot = subprocess.Popen(
            [*_NAMESPACES, "sh", "-c", _BOOT, name, *folders], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self._boot.stdout is not None and self._boot.stdout.readline() == b"ready\n"
        (self._first,) = psutil.Process(self._boot.pid).children()

    @property
    def pid(self) -> int:
        return self._first.pid

    def command(self, *words: object) -> list[str]:
        """The command, on this machine and in this checkout."""
        inside = ["nsenter", f"--target={self.pid}", "--net", "--mount", "--uts", "--pid", f"--wdns={_ROOT}", "--"]
        return [*inside, *map(str, words)]

    def run(self, *words: object, **environment: str) -> subprocess.CompletedProcess[str]:
        return ran(self.command(*words), env={**self.environment, **environment})

    def start(self, *words: object, **environment: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self.command(*words),
            env={**self.environment, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def start_ray(self, *words: str) -> None:
        started = self.run(_RAY, "start", *words, "--num-cpus=2", "--num-gpus=0", "--object-store-memory=80000000")
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
        self._network(self.alpha, _SWITCH)
        self.beta: Machine | None = None
        self.address = f"{self.alpha.address}:6379"
        # As Ray's head has it by default where other machines may reach it; its token is a file, which both share here.
        self.alpha.environment |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(16)}

    def start_beta(self) -> Machine:
        self.beta = Machine("beta", "10.77.0.2", self.shared)
        self.beta.environment = self.alpha.environment
        pids = [str(self.alpha.pid), "type", "veth", "peer", "name", "eth0", "netns", str(self.beta.pid)]
        _succeed(["ip", "link", "add", "port", "netns", *pids])
        _succeed(self.alpha.command("sh", "-c", "ip link set port master eth0 && ip link set port up"))
        self._network(self.beta, _CABLE)
        return self.beta

    def start_ray(self) -> None:
        self.alpha.start_ray("--head", "--port=6379", "--include-dashboard=false", "--disable-usage-stats")

    def join_ray(self) -> None:
        self.start_beta().start_ray(f"--address={self.address}")

    def close(self) -> None:
        for machine in (self.alpha, self.beta):
            if machine is not None:
                machine.kill()

    def _network(self, machine: Machine, script: str) -> None:
        _succeed(machine.command("sh", "-c", script.format(address=machine.address)))


def _succeed(command: list[str]) -> None:
    done = ran(command)
    assert done.returncode == 0, done.stderr


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

"""Hosts of one's own on this machine: Linux namespaces with a network address, a host name, process numbers, a machine
id and a boot id each, which see the same files. Killing one is a power cut for its processes."""

import ctypes
import os
import shutil
import subprocess
import uuid
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO

import psutil
from patience import wait_until

_NEW_NETWORK = 0x40000000
_NETMASK = 24
_SETUP = """
set -e
hostname "$1"
mount --bind "$2/boot_id" /proc/sys/kernel/random/boot_id
mount --bind "$2/machine-id" /etc/machine-id
echo "$3" > /proc/sys/kernel/ns_last_pid
ip link set lo up
touch "$2/up"
while :; do sleep 1000; done
"""
"""Run by process 1, a bash, which also collects orphans."""
_LIBC = ctypes.CDLL(None, use_errno=True)


class Host:
    """One host; `address` is reachable from the other hosts alone."""

    def __init__(self, folder: Path, name: str, address: str, first_pid: int) -> None:
        folder.mkdir()
        (folder / "home").mkdir()
        (folder / "boot_id").write_text(f"{uuid.uuid4()}\n")
        (folder / "machine-id").write_text(f"{uuid.uuid4().hex}\n")
        self.folder, self.name, self.address = folder, name, address
        namespaces = ["--net", "--uts", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child=SIGKILL"]
        arguments = ["bash", "-c", _SETUP, "bash", name, str(folder), str(first_pid)]
        self._outside = subprocess.Popen(["unshare", *namespaces, *arguments], stderr=subprocess.DEVNULL)
        wait_until((folder / "up").exists, f"the start of {name}")
        (first,) = psutil.Process(self._outside.pid).children()
        self._first = first

    @property
    def pid(self) -> int:
        """Its process 1, as numbered outside."""
        return self._first.pid

    def start(
        self, command: Sequence[str | Path], cwd: Path, environment: Mapping[str, str], log: IO[bytes]
    ) -> subprocess.Popen[bytes]:
        """Start a command on the host."""
        return subprocess.Popen(
            ["nsenter", "--all", f"--wd={cwd}", "--target", str(self.pid), "--", *map(str, command)],
            env={**environment, "HOME": str(self.folder / "home")},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )

    def client(self) -> ThreadPoolExecutor:
        """A thread of this process that uses the host's network."""
        return ThreadPoolExecutor(1, initializer=self._enter_network)

    def kill(self) -> None:
        """Kill process 1, and with it all others at once."""
        with suppress(psutil.NoSuchProcess):
            self._first.kill()
        self._outside.wait()

    def _enter_network(self) -> None:
        with Path(f"/proc/{self.pid}/ns/net").open() as namespace:
            if _LIBC.setns(namespace.fileno(), _NEW_NETWORK):
                raise OSError(ctypes.get_errno(), "setns")


@contextmanager
def two_hosts(folder: Path) -> Iterator[tuple[Host, Host]]:
    """`east` and `west`, joined by a cable."""
    with ExitStack() as stack:
        hosts = []
        for number, name in enumerate(("east", "west"), 1):
            # Process numbers that do not overlap, so that the processes of both are told apart in files.
            hosts.append(Host(folder / name, name, f"10.213.77.{number}", 20_000 * number))
            stack.callback(hosts[-1].kill)
        east, west = hosts
        _ip("link", "add", "cable", "netns", str(east.pid), "type", "veth", "peer", "cable", "netns", str(west.pid))
        for host in hosts:
            inside = ["nsenter", "--net", "--target", str(host.pid), "--"]
            _ip("address", "add", f"{host.address}/{_NETMASK}", "dev", "cable", inside=inside)
            _ip("link", "set", "cable", "up", inside=inside)
        yield east, west


def why_not() -> str | None:
    """Why hosts cannot be made here; None if they can."""
    if os.geteuid() != 0:
        return "needs root, for namespaces"
    if missing := [name for name in ("ip", "nsenter", "unshare") if shutil.which(name) is None]:
        return f"needs {', '.join(missing)}"
    probe = [
        "unshare",
        "--net",
        "--uts",
        "--mount",
        "--pid",
        "--fork",
        "--mount-proc",
        "ip",
        "link",
        "add",
        "type",
        "veth",
    ]
    if subprocess.run(probe, capture_output=True, check=False).returncode:
        return "namespaces or veth devices are refused here"
    return None


def _ip(*arguments: str, inside: Sequence[str] = ()) -> None:
    subprocess.run([*inside, "ip", *arguments], check=True)

"""A connection to Ray, on this machine for one stage or in an existing cluster, and places for its processes in it."""

import contextlib
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from luffy.config.execution import RayConfig
from luffy.errors import ClusterError, ConfigError, LuffyError

_CONNECT_S = 5.0
_LOOK_S = 0.05
_OF_THIS_MACHINE = "auto"
_PROGRAMS = str(Path(ray.__file__).parent)
# gRPC runs over HTTP/2, where both sides start with a SETTINGS frame (RFC 9113, 3.4): a 9-byte header, type in byte 4.
_SETTINGS = b"\x04"
_HTTP2_GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0" + _SETTINGS + b"\0" * 5


@contextlib.contextmanager
def ray_session(config: RayConfig, num_actors: int) -> Iterator[None]:
    """Connect to Ray for the length of the context, with room for `num_actors` processes.

    A cluster started here is stopped at the end, and dies with the stage if the stage is killed. Its processes, actors
    included, ignore SIGTERM: a scheduler sends it to all processes of a job, and the stage has to finish its step
    first. In a cluster joined at `config.address` only what this process created is removed. Raises ConfigError when no
    Ray answers there.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Ray replaces the stage's signal handler, which shuts down in order.
    handler = signal.getsignal(signal.SIGTERM)
    try:
        if config.address is None:
            _start(config, num_actors)
        else:
            _join(config.address)
    except SystemExit as ended:  # raised by Ray's handler on SIGTERM
        raise KeyboardInterrupt from ended
    finally:
        signal.signal(signal.SIGTERM, handler)
    try:
        yield
    finally:
        _shut_down(kills=config.address is None)
        # Ray has also reset the kernel's disposition, and the next SIGTERM would kill the stage.
        signal.signal(signal.SIGTERM, handler)


def _start(config: RayConfig, num_actors: int) -> None:
    """Start a cluster on this machine."""
    # Where a Ray job runs luffy, this names files in the storage of that job's cluster.
    os.environ.pop("RAY_JOB_CONFIG_JSON_ENV_VAR", None)
    # Ray's own 15 would leave ranks and engines hardly any time beside whatever else computes on this machine.
    os.environ.setdefault("RAY_worker_niceness", "0")
    explained = _failing_with(lambda text: ClusterError(f"Ray did not start on this machine: {text}"))
    with explained, _sigterm_blocked():
        ray.init(
            address="local",
            # One CPU per actor for Ray's bookkeeping, even on a machine with fewer cores.
            num_cpus=max(os.cpu_count() or 1, num_actors),
            include_dashboard=False,
            log_to_driver=False,
        )


def _is_of_ray(process: psutil.Process) -> bool:
    """Whether it runs a program of Ray's package."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return any(word.startswith(_PROGRAMS) for word in process.cmdline())
    return False


@contextlib.contextmanager
def _sigterm_blocked() -> Iterator[None]:
    """Processes started in this context never receive SIGTERM; they inherit the mask, whatever handler they install.

    Ray blocks Ctrl-C for its daemons in the same way. Other threads of this process still take the signal.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _shut_down(*, kills: bool) -> None:
    """Disconnect, and where it `kills` them, kill the daemons that this process has started.

    Ray would end them one by one, the raylet first: by SIGTERM, which they do not receive, and SIGKILL a second later.
    Once the first is gone, the others have nothing left to do.
    """
    daemons = [process for process in psutil.Process().children() if kills and _is_of_ray(process)]
    if daemons:
        threading.Thread(target=_kill_once_one_is_gone, args=(daemons,), name="ray-end", daemon=True).start()
    ray.shutdown()


def _kill_once_one_is_gone(daemons: Sequence[psutil.Process]) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        while all(process.status() != psutil.STATUS_ZOMBIE for process in daemons):
            time.sleep(_LOOK_S)
    for process in daemons:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def _join(address: str) -> None:
    if address != _OF_THIS_MACHINE:  # where no Ray listens, it would retry for a minute or hang
        host, _, port = address.rpartition(":")
        try:
            with socket.create_connection((host, int(port)), timeout=_CONNECT_S) as connection:
                if os.environ.get("RAY_USE_TLS", "0") == "0":
                    connection.sendall(_HTTP2_GREETING)
                    if connection.recv(9)[3:4] != _SETTINGS:
                        raise ConnectionError("another service listens there")
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"execution.ray.address: no Ray cluster answers at {address} ({error}); start one with "
                "RAY_USAGE_STATS_ENABLED=0 ray start --head and give its HOST:PORT, or remove the address to start Ray "
                "on this machine"
            ) from error
    with _failing_with(
        lambda text: ConfigError(
            f"execution.ray.address: cannot join the Ray cluster at {address} ({text.splitlines()[0]}); it has to run "
            "the same Ray version, and if its head requires a token (~/.ray/auth_token exists), set "
            "RAY_AUTH_MODE=token here too"
        )
    ):
        ray.init(address=address, log_to_driver=False, logging_level=logging.WARNING)


@contextlib.contextmanager
def _failing_with(explain: Callable[[str], LuffyError]) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # Ray raises plain Exception when one of its own processes does not come up
        raise explain(str(error).strip() or type(error).__name__) from error


logger = logging.getLogger(__name__)
_QUIET_S = 10.0
"""A longer wait for resources is logged once."""
_UNEXPECTED = 2
"""Ray's number of the death of a machine that nobody has asked to end."""
Bundle = dict[str, float]


@dataclass(frozen=True, slots=True)
class Place:
    """Resources of one process."""

    bundle: int
    """Index in the placement group."""
    cpus: float
    gpus: float
    """A fraction for a shared GPU."""


@dataclass(frozen=True, slots=True)
class Layout:
    """The bundles to request from Ray, and the place of each process in them."""

    bundles: Sequence[Bundle]
    ranks: Sequence[Place]
    engines: Sequence[Place]

    def total(self, kind: str) -> float:
        """Amount of a resource (`GPU`, `CPU`) over all bundles."""
        return sum(bundle.get(kind, 0) for bundle in self.bundles)


def layout(config: RayConfig, tensor_parallel_size: int, gpus: bool, num_engines: int) -> Layout:
    """One GPU per rank, `tensor_parallel_size` per engine; without GPUs, one CPU each.

    A bundle lies on one machine, so an engine, which is one process, is never split over two. When colocated, a rank
    and its engine share one, and request half a GPU each, which is bookkeeping for Ray: both can use all of it.
    """
    if num_engines and config.placement == "colocated":
        halves = [Place(rank, cpus=1, gpus=0.5 if gpus else 0) for rank in range(config.trainer_ranks)]
        bundle: Bundle = {"CPU": 2, "GPU": 1} if gpus else {"CPU": 2}
        return Layout([bundle] * config.trainer_ranks, halves, halves)
    return layout_apart(config.trainer_ranks, num_engines, tensor_parallel_size, gpus)


def layout_apart(num_ranks: int, num_engines: int, tensor_parallel_size: int, gpus: bool) -> Layout:
    """Every rank and every engine on GPUs of its own; without GPUs, a CPU each."""
    of_engine = tensor_parallel_size if gpus else 0
    of_rank = 1 if gpus else 0
    ranks = [Place(rank, 1, of_rank) for rank in range(num_ranks)]
    engines = [Place(num_ranks + engine, 1, of_engine) for engine in range(num_engines)]
    bundles: list[Bundle] = [{"CPU": 1} | ({"GPU": place.gpus} if gpus else {}) for place in (*ranks, *engines)]
    return Layout(bundles, ranks, engines)


def joined_gpus() -> float:
    """GPUs of the joined cluster, free or not."""
    gpus: float = ray.cluster_resources().get("GPU", 0)
    return gpus


def lost_machines() -> dict[str, str]:
    """The machines that Ray knows and does not reach: their IDs, with a name for people."""
    return {node["NodeID"]: machine_name(node) for node in ray.nodes() if not node["Alive"]}


def machine_name(node: Mapping[str, Any]) -> str:
    return f"machine {node['NodeManagerHostname']} ({node['NodeManagerAddress']})"


def lacks(bundles: Sequence[Bundle]) -> str:
    """What the cluster has too little of for `bundles`, in words, and the machines that it has lost; empty: nothing."""
    there = ray.cluster_resources()
    for kind in ("GPU", "CPU"):
        number = sum(bundle.get(kind, 0) for bundle in bundles)
        if number > there.get(kind, 0):
            back = {node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
            lost = [
                machine_name(node)
                for node in ray.nodes()
                if node["DeathReason"] == _UNEXPECTED and node["NodeManagerAddress"] not in back
            ]
            gone = f"; gone: {', '.join(lost)}" if lost else ""
            return f"{number:g} {kind}s, the cluster has {there.get(kind, 0):g}{gone}"
    return ""


def reserve(wanted: Layout, timeout_s: float) -> PlacementGroup:
    """Reserve all resources of a run or none; Ray releases them when this process disconnects.

    Raises ConfigError when the cluster is too small, ClusterError when the resources are not free in time.
    """
    # The settings that the layout comes from; one without ranks is an evaluation's.
    claim = f"execution.ray: trainer_ranks {len(wanted.ranks)} and engines {len(wanted.engines)}"
    if not wanted.ranks:
        claim = f"execution.vllm: engines {len(wanted.engines)} over tensor_parallel_size GPUs each"
    if lack := lacks(wanted.bundles):
        raise ConfigError(f"{claim} need {lack}; lower them or add machines")
    group = placement_group(list(wanted.bundles), strategy="PACK")
    started, told = time.monotonic(), False
    while not group.wait(1):
        waited_s = time.monotonic() - started
        if waited_s > timeout_s:
            remove_placement_group(group)
            raise ClusterError(
                f"{wanted.total('GPU'):g} GPUs and {wanted.total('CPU'):g} CPUs did not become free within "
                f"{timeout_s:g} s; is another run using the cluster?"
            )
        if waited_s > _QUIET_S and not told:
            logger.warning("waiting for GPUs and CPUs of the Ray cluster, for %g s at most", timeout_s)
            told = True
    return group


def machines_of(group: PlacementGroup) -> dict[int, str]:
    """The ID of the machine of each bundle of a reservation."""
    machines: dict[int, str] = ray.util.placement_group_table(group)["bundles_to_node_id"]
    return machines

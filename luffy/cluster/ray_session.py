"""A connection to Ray: a cluster started on this machine for one stage, or an existing one."""

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil
import ray

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
    daemons: Sequence[psutil.Process] = ()
    try:
        if config.address is None:
            daemons = _start(config, num_actors)
        else:
            _join(config.address)
    except SystemExit as ended:  # raised by Ray's handler on SIGTERM
        raise KeyboardInterrupt from ended
    finally:
        signal.signal(signal.SIGTERM, handler)
    try:
        yield
    finally:
        _shut_down(daemons)
        # Ray has also reset the kernel's disposition, and the next SIGTERM would kill the stage.
        signal.signal(signal.SIGTERM, handler)


def _start(config: RayConfig, num_actors: int) -> list[psutil.Process]:
    """Start a cluster on this machine; returns its daemons."""
    # Where a Ray job runs luffy, this names files in the storage of that job's cluster.
    os.environ.pop("RAY_JOB_CONFIG_JSON_ENV_VAR", None)
    earlier = psutil.Process().children()
    explained = _failing_with(lambda text: ClusterError(f"Ray did not start on this machine: {text}"))
    with explained, _sigterm_blocked():
        ray.init(
            address="local",
            # One CPU per actor for Ray's bookkeeping, even on a machine with fewer cores.
            num_cpus=max(os.cpu_count() or 1, num_actors),
            include_dashboard=config.dashboard,
            dashboard_host="127.0.0.1",
            log_to_driver=False,
        )
    return [process for process in psutil.Process().children() if process not in earlier and _is_of_ray(process)]


def _is_of_ray(process: psutil.Process) -> bool:
    """Whether it runs a program of Ray's package; other threads may have started processes meanwhile."""
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


def _shut_down(daemons: Sequence[psutil.Process]) -> None:
    """Disconnect, and kill the daemons.

    Ray would end them one by one, the raylet first: by SIGTERM, which they do not receive, and SIGKILL a second later.
    Once the first is gone, the others have nothing left to do.
    """
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
    if address != _OF_THIS_MACHINE:
        _check_answers(address)
    with _failing_with(
        lambda text: ConfigError(
            f"execution.ray.address: cannot join the Ray cluster at {address} ({text.splitlines()[0]}); it has to run "
            "the same Ray version, and if its head requires a token (~/.ray/auth_token exists), set "
            "RAY_AUTH_MODE=token here too"
        )
    ):
        ray.init(address=address, log_to_driver=False)


@contextlib.contextmanager
def _failing_with(explain: Callable[[str], LuffyError]) -> Iterator[None]:
    """Turn any error into `explain(text of the error)`."""
    try:
        yield
    except Exception as error:  # Ray raises plain Exception when one of its own processes does not come up
        raise explain(str(error).strip() or type(error).__name__) from error


def _check_answers(address: str) -> None:
    """Fail fast where no Ray listens: Ray itself would retry for a minute or hang."""
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
            "RAY_USAGE_STATS_ENABLED=0 ray start --head and give its HOST:PORT, or remove the address to start Ray on "
            "this machine"
        ) from error

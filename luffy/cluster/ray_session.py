"""Ray itself: started on this machine for one stage, or joined where it runs."""

import contextlib
import os
import signal
import socket
from collections.abc import Iterator

import ray

from luffy.config.execution import RayConfig
from luffy.errors import ClusterError, ConfigError

_CONNECT_S = 5.0
_OF_THIS_MACHINE = "auto"
# gRPC is HTTP/2, in which either side opens with a frame of settings (RFC 9113, 3.4): 9 bytes, the fourth is its type.
_SETTINGS = b"\x04"
_HTTP2_GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0" + _SETTINGS + b"\0" * 5


@contextlib.contextmanager
def ray_session(config: RayConfig, num_actors: int) -> Iterator[None]:
    """Ray, for as long as the context lasts, with room for `num_actors` processes.

    Started here it ends here: its processes carry the mark of the stage and are killed by the kernel with it. Joined at
    `config.address` only what this process has made is removed. Raises ConfigError when nothing answers there.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Ray's agents write their titles over their environment otherwise, and the mark of the stage is there: where Ray's
    # head dies they would live on for a minute.
    os.environ["SPT_NOENV"] = "1"
    # Ray puts its own handler in the place of the stage's, which knows how to end in order.
    handler = signal.getsignal(signal.SIGTERM)
    try:
        if config.address is None:
            _start(config, num_actors)
        else:
            _join(config.address)
    except SystemExit as ended:  # what Ray's handler makes of SIGTERM
        raise KeyboardInterrupt from ended
    finally:
        signal.signal(signal.SIGTERM, handler)
    try:
        yield
    finally:
        ray.shutdown()


def _start(config: RayConfig, num_actors: int) -> None:
    try:
        ray.init(
            address="local",
            # A CPU each is only how Ray counts: on a laptop more processes than cores take turns.
            num_cpus=max(os.cpu_count() or 1, num_actors),
            include_dashboard=config.dashboard,
            dashboard_host="127.0.0.1",
            log_to_driver=False,
        )
    except Exception as error:
        raise ClusterError(f"Ray did not start on this machine: {error}") from error


def _join(address: str) -> None:
    if address != _OF_THIS_MACHINE:
        _check_answers(address)
    try:
        ray.init(address=address, log_to_driver=False)
    except Exception as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise ConfigError(
            f"execution.ray.address: Ray cannot join the cluster at {address} ({lines[0]}); it must run the same Ray, "
            "and where its head wants a token (it has found ~/.ray/auth_token), set RAY_AUTH_MODE=token here, too"
        ) from error


def _check_answers(address: str) -> None:
    """Refuse an address at which no Ray listens: Ray itself would try for a minute, or wait without an end."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=_CONNECT_S) as connection:
            if os.environ.get("RAY_USE_TLS", "0") == "0":
                connection.sendall(_HTTP2_GREETING)
                if connection.recv(9)[3:4] != _SETTINGS:
                    raise ConnectionError("what listens there is not Ray")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"execution.ray.address: no Ray cluster answers at {address} ({error}); start one with "
            "ray start --head and give its HOST:PORT, or remove the address to start Ray on this machine"
        ) from error

"""Ray itself: started on this machine for one stage, or joined where it runs."""

import contextlib
import os
import signal
import socket
from collections.abc import Iterator

import ray

from luffy.config.execution import RayConfig
from luffy.errors import ConfigError

_CONNECT_S = 5.0
_DEFAULT_PORT = 6379


@contextlib.contextmanager
def ray_session(config: RayConfig, num_actors: int) -> Iterator[None]:
    """Ray, for as long as the context lasts, with room for `num_actors` processes.

    Started here it ends here: its processes carry the mark of the stage and are killed by the kernel with it. Joined at
    `config.address` only what this process has made is removed. Raises ConfigError when nothing answers there.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Ray puts its own handler in the place of the stage's, which knows how to end in order.
    handler = signal.getsignal(signal.SIGTERM)
    if config.address is None:
        ray.init(
            address="local",
            # A CPU each is only how Ray counts: on a laptop more processes than cores take turns.
            num_cpus=max(os.cpu_count() or 1, num_actors),
            include_dashboard=config.dashboard,
            dashboard_host="127.0.0.1",
            log_to_driver=False,
        )
    else:
        _check_answers(config.address)
        ray.init(address=config.address, log_to_driver=False)
    signal.signal(signal.SIGTERM, handler)
    try:
        yield
    finally:
        ray.shutdown()


def _check_answers(address: str) -> None:
    """Refuse an address at which nobody listens: Ray itself would try for a minute."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    try:
        with socket.create_connection((host or address, int(port) if host else _DEFAULT_PORT), timeout=_CONNECT_S):
            pass
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"execution.ray.address: no Ray cluster answers at {address} ({error}); start one with "
            "ray start --head, or remove the address to start Ray on this machine"
        ) from error

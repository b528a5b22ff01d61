"""The tag of a flow run that names the host on which it runs, so that a server can tell which runs are not its own."""

import socket
from collections.abc import Iterable

_PREFIX = "host:"


def with_own_host(tags: Iterable[str]) -> list[str]:
    """`tags` with this host in place of the one that an earlier try of the run was on."""
    return [*(tag for tag in tags if not tag.startswith(_PREFIX)), _own()]


def names_another_host(tags: Iterable[str]) -> bool:
    """Whether `tags` are those of a run on another host; False for a run that has not said where it is."""
    return any(tag.startswith(_PREFIX) and tag != _own() for tag in tags)


def _own() -> str:
    return f"{_PREFIX}{socket.gethostname()}"

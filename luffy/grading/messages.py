"""Messages between the pool and a worker: one JSON message each way, over a socket pair.

JSON instead of pickle: a response is untrusted text, and ASCII escapes carry even lone surrogates.
"""

import json
from multiprocessing.connection import Connection
from typing import NamedTuple

from luffy.grading.request import Verification
from luffy.types import Outcome

READY = "ready"
LOAD = "load"
"""The check that only loads a user's function, whose path stands in place of the answer."""


class Reply(NamedTuple):
    """A worker's verdict."""

    outcome: Outcome
    reason: str
    reward: float | None = None
    misconfigured: bool = False
    """The check itself is wrong (a function that cannot be imported): `reason` is for the user."""


def send_work(connection: Connection, work: Verification) -> None:
    """Send a verification to a worker."""
    connection.send_bytes(json.dumps(work._replace(note="")).encode())


def receive_work(connection: Connection) -> Verification:
    """Return the next verification; EOFError when the pool is gone."""
    return Verification(*json.loads(connection.recv_bytes()))


def send_ready(connection: Connection) -> None:
    """Tell the pool that the worker has loaded."""
    connection.send_bytes(READY.encode())


def receive_ready(connection: Connection) -> bool:
    """Return whether the worker says that it has loaded; EOFError when it died."""
    return connection.recv_bytes() == READY.encode()


def send_reply(connection: Connection, reply: Reply) -> None:
    """Send a verdict to the pool."""
    connection.send_bytes(json.dumps(reply).encode())


def receive_reply(connection: Connection) -> Reply:
    """Return the worker's verdict; EOFError when it died."""
    outcome, *rest = json.loads(connection.recv_bytes())
    return Reply(Outcome(outcome), *rest)

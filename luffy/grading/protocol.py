"""What passes between the pool and a worker: one JSON message each way, over a socket pair.

JSON and no pickle: a response is untrusted text, and ASCII escapes carry even lone surrogates.
"""

import json
from multiprocessing.connection import Connection

from luffy.types import Outcome

READY = "ready"
_Pair = tuple[str, str]


def send_pair(connection: Connection, pair: _Pair) -> None:
    """Send (answer, ground truth) to a worker."""
    connection.send_bytes(json.dumps(pair).encode())


def receive_pair(connection: Connection) -> _Pair:
    """Return the next pair to verify; EOFError when the pool is gone."""
    answer, ground_truth = json.loads(connection.recv_bytes())
    return answer, ground_truth


def send_word(connection: Connection, word: str) -> None:
    """Send `READY` or an outcome to the pool."""
    connection.send_bytes(word.encode())


def receive_word(connection: Connection) -> str:
    """Return what the worker said; EOFError when it died."""
    return connection.recv_bytes().decode()


def receive_outcome(connection: Connection) -> Outcome:
    """Return the worker's verdict; EOFError when it died."""
    return Outcome(receive_word(connection))

"""Several ranks on one machine without Ray: rank 0 in this process, each other in a process of its own.

    with rank_processes(spec, num_ranks) as ranks:
        results = ranks.call(SupervisedRank.step, arguments)

They meet on the loopback address, over gloo on CPUs and NCCL on GPUs, of which each takes the one of its number. They
end with this process, however it ends. A process group cannot be formed twice, so a process opens ranks once.
"""

import multiprocessing
import os
import pickle
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from typing import Any, Generic, TypeVarTuple

import torch

from luffy.errors import LostError, LuffyError
from luffy.processes import die_with, exit_without_finalizing, name_interface
from luffy.training.ranks import Rank, RankSpec, Result, join_process_group

_HOST = "127.0.0.1"
_LAST_WORDS_S = 5.0
"""How long the other ranks have to say what happened, once a collective has failed here."""
_Arguments = TypeVarTuple("_Arguments")


class RankProcesses(Generic[Rank]):
    """The ranks of `rank_processes`."""

    def __init__(self, own: Rank, connections: Sequence[Connection]) -> None:
        self._own = own
        self._connections = connections
        self.num_ranks = 1 + len(connections)

    @property
    def num_gpus(self) -> int:
        return self.num_ranks if torch.cuda.is_available() else 0

    def call(
        self, method: Callable[[Rank, *_Arguments], Result], arguments: Sequence[tuple[*_Arguments]]
    ) -> list[Result]:
        """Call `method` on every rank at once. Raises what a rank raises; LostError when one has died."""
        for rank, (connection, given) in enumerate(zip(self._connections, arguments[1:], strict=True), start=1):
            with _lost(rank):
                connection.send_bytes(pickle.dumps((method, given)))
        try:
            own = method(self._own, *arguments[0])
        except LuffyError:
            raise
        except Exception:  # in a collective it is the result of a failure elsewhere
            self._raise_others(time.monotonic() + _LAST_WORDS_S)
            raise
        return [own, *(self._answer(rank) for rank in range(1, self.num_ranks))]

    def _answer(self, rank: int) -> Any:
        with _lost(rank):
            failure, result = pickle.loads(self._connections[rank - 1].recv_bytes())  # noqa: S301 - a process of ours
        if failure is not None:
            raise failure
        return result

    def _raise_others(self, deadline: float) -> None:
        for rank, connection in enumerate(self._connections, start=1):
            if connection.poll(max(0.0, deadline - time.monotonic())):
                self._answer(rank)


@contextmanager
def _lost(rank: int) -> Iterator[None]:
    try:
        yield
    except (EOFError, OSError):
        raise LostError(f"trainer rank {rank} died (out of memory?); the same command resumes the stage") from None


@contextmanager
def rank_processes(spec: RankSpec[Rank], num_ranks: int) -> Iterator[RankProcesses[Rank]]:
    """Open so many ranks."""
    context = multiprocessing.get_context("spawn")  # threads of this process may hold locks, which a fork would copy
    name_interface(_HOST)
    connections: list[Connection] = []
    processes = []
    try:
        with socket.create_server((_HOST, 0)) as listening:
            port = listening.getsockname()[1]
            for rank in range(1, num_ranks):
                here, there = context.Pipe()
                given = (there, spec, rank, num_ranks, port, torch.get_num_threads(), os.getpid())
                process = context.Process(target=_serve, args=given, name=f"rank {rank}", daemon=True)
                process.start()
                there.close()  # or its end would go unnoticed
                connections.append(here)
                processes.append(process)
            os.environ |= {"RANK": "0", "WORLD_SIZE": str(num_ranks), "LOCAL_RANK": "0"}
            join_process_group(_HOST, port, listening.detach())
        ranks = RankProcesses(spec.open_rank(), connections)
        for rank in range(1, num_ranks):
            ranks._answer(rank)
        yield ranks
    finally:  # also where this rank has failed to open: at its exit, this process would wait for the others
        for connection in connections:
            connection.close()
        for process in processes:
            process.join(_LAST_WORDS_S)
            process.kill()


def _serve(
    connection: Connection,
    spec: RankSpec[Rank],
    rank: int,
    num_ranks: int,
    port: int,
    num_threads: int,
    parent: int,
) -> None:
    """Answer the calls of rank 0 until it has ended, in a process of this rank's own."""
    die_with(parent)
    for number in (signal.SIGINT, signal.SIGTERM):  # rank 0 decides when the stage ends
        signal.signal(number, signal.SIG_IGN)
    torch.set_num_threads(num_threads)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(num_ranks), "LOCAL_RANK": str(rank)}
    with suppress(EOFError, ConnectionError):  # rank 0 has ended
        try:
            join_process_group(_HOST, port, None)
            own = spec.open_rank()
            connection.send_bytes(pickle.dumps((None, None)))
            while True:
                method, given = pickle.loads(connection.recv_bytes())  # noqa: S301 - from the process that started it
                connection.send_bytes(pickle.dumps((None, method(own, *given))))
        except (EOFError, ConnectionError):
            raise
        except Exception as error:  # noqa: BLE001 - rank 0 raises it
            connection.send_bytes(pickle.dumps((error, None)))
    exit_without_finalizing(0)

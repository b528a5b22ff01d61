"""A process group in which rank 0 sends tensors to all others, made beside the default group of torch.

Nothing about it is registered in torch, so it can be closed after a failure and formed again with other members, in
processes that belong to other groups (DeepSpeed's, vLLM's). Members on CPUs use gloo. Members on GPUs use NCCL, by the
same calls; this has never been run.
"""

import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from luffy.errors import LuffyError


class BroadcastFailed(LuffyError):
    """The group did not form, or lost a member; the tensors on their way are undefined."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A named tensor without its values, from which a receiver allocates it."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, name: str, tensor: Tensor) -> "TensorSpec":
        return cls(name, tuple(tensor.shape), tensor.dtype)

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def tensor(self, data: Tensor) -> Tensor:
        """The tensor whose bytes `data` has (see `bytes_of`), in the same memory."""
        return data.view(self.dtype).view(self.shape)


def bytes_of(tensor: Tensor) -> Tensor:
    """The values of a tensor as one row of bytes (uint8), in the same memory if it is contiguous."""
    return tensor.contiguous().view(-1).view(torch.uint8)


@dataclass(frozen=True, slots=True)
class Invitation:
    """How to join a group."""

    host: str
    port: int
    size: int
    """Processes in the group, rank 0 included."""
    timeout_s: float
    """Time limit for forming the group, and of each wait for tensors."""

    def join(self, rank: int, device: torch.device) -> "BroadcastGroup":
        """Join as a receiver on `device`; returns when all members have joined. Raises BroadcastFailed."""
        with _failing("a member did not join"):
            store = dist.TCPStore(self.host, self.port, is_master=False, timeout=timedelta(seconds=self.timeout_s))
            return BroadcastGroup(store, self, rank, device)


class Meeting:
    """The place where the members of a group find each other, opened by the process that will send.

    Raises BroadcastFailed where this machine cannot be reached at `host`.
    """

    def __init__(self, host: str, size: int, timeout_s: float) -> None:
        timeout = timedelta(seconds=timeout_s)
        with _failing(f"{host} cannot be reached"):
            self._store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timeout)
        self.invitation = Invitation(host, self._store.port, size, timeout_s)

    def lead(self, device: torch.device, members: Sequence[str]) -> "BroadcastGroup":
        """Join as rank 0; returns when all members have joined. Raises BroadcastFailed."""
        with _failing("a member did not join"):
            return BroadcastGroup(self._store, self.invitation, 0, device, members)


class BroadcastGroup:
    """One process's part in a formed group."""

    def __init__(
        self, store: dist.Store, invitation: Invitation, rank: int, device: torch.device, members: Sequence[str] = ()
    ) -> None:
        self.members = tuple(members)
        """Names of the receivers; known to rank 0 alone."""
        self._store = store  # that of rank 0 is the server, which has to outlive the group
        self._timeout = timedelta(seconds=invitation.timeout_s)
        self._backend: Any = _backend(device, store, rank, invitation.size, self._timeout)
        # NCCL connects at the first use: let a member that is missing show here.
        self.finish(self.start([torch.zeros(1, device=device)]))

    @property
    def is_open(self) -> bool:
        """Whether it can still be used."""
        return self._backend is not None

    def start(self, tensors: Sequence[Tensor]) -> list[dist.Work]:
        """Begin to send the tensors, at rank 0, or to receive into them, elsewhere; they are contiguous."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        with _failing("a member is gone"):
            return [self._backend.broadcast([tensor], options) for tensor in tensors]

    def finish(self, started: Sequence[dist.Work]) -> None:
        """Wait until the tensors have been sent or received. Raises BroadcastFailed."""
        with _failing("a member is gone or hangs"):
            for work in started:
                work.wait(self._timeout)

    def receive(self, specs: Sequence[TensorSpec], device: torch.device) -> list[Tensor]:
        """The tensors that rank 0 sends next, on `device`. Raises BroadcastFailed."""
        tensors = [torch.empty(spec.shape, dtype=spec.dtype, device=device) for spec in specs]
        self.finish(self.start(tensors))
        return tensors

    def close(self) -> None:
        """End the connections, so that no other member waits for this one. May be called twice.

        Over gloo, a wait for a member that hangs is ended by its time limit and not before.
        """
        if self._backend is not None:
            self._backend.abort()
            self._backend = None


def _backend(device: torch.device, store: dist.Store, rank: int, size: int, timeout: timedelta) -> object:
    if device.type == "cpu":
        return dist.ProcessGroupGloo(store, rank, size, timeout)
    # Read by the constructor: a wait has to raise in its own thread, where torch's default is to end the process.
    name = "TORCH_NCCL_BLOCKING_WAIT"
    before = os.environ.get(name)
    os.environ[name] = "1"
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    try:
        return dist.ProcessGroupNCCL(store, rank, size, options)
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before


@contextmanager
def _failing(why: str) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # torch raises it, or a subclass, for every failure of a connection
        first = next(iter(str(error).splitlines()), "")
        raise BroadcastFailed(f"{why}: {first}") from error

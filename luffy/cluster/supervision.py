"""Calls to actors with a time limit on every wait, and errors that name the process that died."""

import socket
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import ActorUnavailableError, RayActorError, RayError, RayTaskError

from luffy.cluster.ray_session import lost_machines
from luffy.errors import ClusterError, LostError, LuffyError

_TAIL_LINES = 15
_CLOSED = "the cluster was closed"
_LOOK_S = 1.0
"""Interval at which a wait checks that Ray is still running."""
_CONNECT_S = 2.0
_HEAD_GRACE_S = 10.0
"""Time that Ray's head may be unreachable. After 60 s Ray itself would silently end this process."""
_FIND_CAUSE_S = 60.0
"""Time for Ray to notice a death, once another process has failed because it lost its connection to the dead one."""


@dataclass(frozen=True, slots=True)
class Member:
    """A process of the cluster, as seen by the stage."""

    name: str
    """For example `trainer rank 1` or `engine 0`."""
    handle: ActorHandle
    log: Path
    machine: str = ""
    """Ray's ID of the machine that it was started on."""

    def tail(self) -> str:
        if not self.log.exists():
            return f"(no log at {self.log})"
        with self.log.open(encoding="utf-8", errors="replace") as lines:
            return "".join(deque(lines, maxlen=_TAIL_LINES)).rstrip() or "(the log is empty)"


class MemberDied(LostError):
    """A process of the cluster died or stopped answering; `why` may name a whole machine instead."""

    def __init__(self, member: Member, why: str, machine: str = "") -> None:
        told = f"{machine or member.name} {why}; the same command resumes the stage"
        super().__init__(told if machine else f"{told}. The end of {member.log}:\n{member.tail()}")
        self.member = member


class Supervisor:
    """Waits for results from the members of a cluster, in any number of threads, until it is closed.

    A LuffyError raised in a member is raised unchanged. A process that died or hangs raises MemberDied; any other
    failure of a process or of Ray raises ClusterError.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._num_waiting = 0
        self._closed = False
        self._members: dict[str, Member] = {}
        """The last of each name that was waited for."""

    def answers(self, members: Sequence[Member], asked: Sequence[Any], timeout_s: float) -> list[Any]:
        """The results of all members, in order.

        The first failure ends the wait, since the other members may be waiting for the failed one. So do `timeout_s`
        seconds without any result.
        """
        waiting: dict[Any, Member] = dict(zip(asked, members, strict=True))
        found: dict[Any, Any] = {}
        while waiting:
            reference, answer = self.first_answer(waiting, timeout_s)
            del waiting[reference]
            found[reference] = answer
        return [found[reference] for reference in asked]

    def first_answer(self, asked: Mapping[Any, Member], timeout_s: float) -> tuple[Any, Any]:
        self._members |= {member.name: member for member in asked.values()}
        with self._waiting():
            reference = self._first(asked, timeout_s)
            try:
                return reference, ray.get(reference)
            except RayActorError as error:
                raise self._death(asked[reference], error) from error
            except RayTaskError as error:
                if isinstance(error.cause, LuffyError):
                    raise error.cause from None
                self._find_cause({other: member for other, member in asked.items() if other != reference})
                member = asked[reference]
                raise ClusterError(
                    f"{member.name} failed: {_last_line(error)}; the end of {member.log}:\n{member.tail()}"
                ) from error
            except RayError as error:
                check_ray()
                raise ClusterError(f"{asked[reference].name}: {_last_line(error)}") from error

    def check_open(self) -> None:
        if self._closed:
            raise ClusterError(_CLOSED)

    def close(self) -> None:
        """End all waits with a ClusterError in their threads; Ray can be shut down afterwards."""
        with self._changed:
            self._closed = True
            self._changed.wait_for(lambda: self._num_waiting == 0, _HEAD_GRACE_S + 2 * _LOOK_S)

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        with self._changed:
            self._num_waiting += 1
        try:
            yield
        finally:
            with self._changed:
                self._num_waiting -= 1
                self._changed.notify_all()

    def _first(self, asked: Mapping[Any, Member], timeout_s: float) -> Any:
        deadline = time.monotonic() + timeout_s
        while not self._closed:
            done, waiting = ray.wait(list(asked), timeout=min(_LOOK_S, timeout_s))
            if done:
                return done[0]
            gone = check_ray()
            for member in asked.values():
                if member.machine in gone:
                    raise self.loss_of(member, gone[member.machine])
            if time.monotonic() > deadline:
                raise MemberDied(asked[waiting[0]], f"has not answered for {timeout_s:g} s")
        raise ClusterError(_CLOSED)

    def loss_of(self, member: Member, machine: str) -> MemberDied:
        """The loss of a member's machine, with all that ran there."""
        lost = [each.name for each in self._members.values() if each.machine == member.machine]
        return MemberDied(member, f"is gone, and with it {', '.join(sorted({member.name, *lost}))}", machine)

    def _death(self, member: Member, error: RayActorError) -> MemberDied:
        deadline = time.monotonic() + _FIND_CAUSE_S
        while True:
            gone = check_ray()
            if member.machine in gone:
                return self.loss_of(member, gone[member.machine])
            # A connection that broke: Ray settles within seconds whether the machine is gone.
            if not isinstance(error, ActorUnavailableError) or time.monotonic() > deadline:
                return MemberDied(member, "died")
            time.sleep(_LOOK_S)

    def _find_cause(self, others: Mapping[Any, Member]) -> None:
        """Raise MemberDied when another member turns out to be dead, which explains the first failure."""
        waiting, deadline = list(others), time.monotonic() + _FIND_CAUSE_S
        while waiting and (left := deadline - time.monotonic()) > 0:
            done, waiting = ray.wait(waiting, timeout=left)
            for reference in done:
                try:
                    ray.get(reference)
                except RayActorError as error:
                    raise self._death(others[reference], error) from error
                except RayError:
                    continue  # it also lost its connection


def check_ray() -> dict[str, str]:
    """The machines that Ray has lost: their IDs, with a name for people.

    Raises LostError when Ray's head or its daemon on this machine is gone.
    """
    context = ray.get_runtime_context()
    host, _, port = context.gcs_address.rpartition(":")
    deadline = time.monotonic() + _HEAD_GRACE_S
    while True:
        try:
            socket.create_connection((host, int(port)), timeout=_CONNECT_S).close()
            break
        except OSError:
            if time.monotonic() > deadline:
                lost = f"Ray's head at {context.gcs_address} is gone; the same command resumes the stage"
                raise LostError(lost) from None
            time.sleep(_LOOK_S)
    here, gone = context.get_node_id(), lost_machines()
    if here in gone:
        raise LostError("Ray's daemon on this machine (raylet) is gone; the same command resumes the stage")
    return gone


def _last_line(error: BaseException) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[-1].strip() if lines else type(error).__name__

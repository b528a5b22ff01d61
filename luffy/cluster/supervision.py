"""Asking actors and hearing of it when they are gone: no wait without a bound, and a dead process is named."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

from luffy.errors import ClusterError, LuffyError

_TAIL_LINES = 15


@dataclass(frozen=True, slots=True)
class Member:
    """A process of the cluster as the stage knows it."""

    name: str
    """`trainer rank 1`, `engine 0`."""
    handle: ActorHandle
    log: Path

    def tail(self) -> str:
        """The end of its log."""
        if not self.log.exists():
            return f"(no log at {self.log})"
        with self.log.open(encoding="utf-8", errors="replace") as lines:
            return "".join(deque(lines, maxlen=_TAIL_LINES)).rstrip()


class MemberDied(ClusterError):
    """A process of the cluster is gone."""

    def __init__(self, member: Member, why: str) -> None:
        super().__init__(f"{member.name} {why}; the end of {member.log}:\n{member.tail()}")
        self.member = member


def answers(members: Sequence[Member], asked: Sequence[Any], timeout_s: float) -> list[Any]:
    """What the members say, in their order, once all have answered.

    The first failure of any of them ends the wait: the others may wait for the dead one. A LuffyError of theirs is
    raised as it is; raises MemberDied for a process that is gone or silent for `timeout_s`, ClusterError for any other
    failure.
    """
    waiting = list(asked)
    while waiting:
        done, waiting = ray.wait(waiting, num_returns=1, timeout=timeout_s)
        if not done:
            silent = members[asked.index(waiting[0])]
            raise MemberDied(silent, f"has not answered for {timeout_s:g} s")
        _take(members[asked.index(done[0])], done[0], timeout_s)
    return [_take(member, reference, timeout_s) for member, reference in zip(members, asked, strict=True)]


def _take(member: Member, reference: Any, timeout_s: float) -> Any:
    try:
        return ray.get(reference, timeout=timeout_s)
    except RayActorError as error:
        raise MemberDied(member, "died") from error
    except RayTaskError as error:
        cause = error.cause
        if isinstance(cause, LuffyError):
            raise cause from None
        raise ClusterError(
            f"{member.name} failed: {_last_line(error)}; the end of {member.log}:\n{member.tail()}"
        ) from error
    except GetTimeoutError as error:
        raise MemberDied(member, f"has not answered for {timeout_s:g} s") from error
    except RayError as error:
        raise ClusterError(f"Ray is gone ({_last_line(error)}); the same command resumes the stage") from error


def _last_line(error: BaseException) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[-1].strip() if lines else type(error).__name__

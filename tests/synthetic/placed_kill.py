"""`kill -9` of a gated actor at a chosen place of its work."""

import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import ray
from support.patience import PATIENCE_S, wait_until

from luffy.cluster.supervision import Member
from synthetic.gated_actors import Gate

Result = TypeVar("Result")


def pid_of(member: Member) -> int:
    pid: int = ray.get(member.handle.pid.remote(), timeout=PATIENCE_S)
    return pid


def kill_at(member: Member, place: str, work: Callable[[], Result]) -> Result:
    """What `work` returns or raises; the member is killed when it comes to the gate `place` in it."""
    pid, gate = pid_of(member), Gate(member.log, place)
    gate.close()
    with ThreadPoolExecutor(1) as threads:
        working = threads.submit(work)
        try:
            wait_until(lambda: gate.is_reached() or working.done(), f"{member.name} at its gate {place!r}")
            assert gate.is_reached() and not working.done()
        finally:
            gate.open()
            os.kill(pid, signal.SIGKILL)
        return working.result(timeout=PATIENCE_S)

"""The lock between runs and garbage collection: runs that begin or enter a stage share it, deletion holds it alone.

So a run's process is in its record before garbage collection can take the run for a dead one, and a result is in a
run's record before garbage collection can find that no run uses it.
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from luffy.pipeline.workspace import Workspace
from luffy.pipeline.workspace.space import usable

_FILE = ".claims.lock"


def claiming(workspace: Workspace) -> AbstractContextManager[None]:
    """Held while a run begins, or decides on a stage and enters it into its record; waits for a deletion to end."""
    return _held(workspace, fcntl.LOCK_SH)


def disposing(workspace: Workspace) -> AbstractContextManager[None]:
    """Held from the survey of garbage until it is renamed; no run begins or enters a stage meanwhile."""
    return _held(workspace, fcntl.LOCK_EX)


@contextmanager
def _held(workspace: Workspace, mode: int) -> Iterator[None]:
    with usable(workspace.root):
        descriptor = os.open(workspace.root / _FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, mode)
        yield
    finally:
        os.close(descriptor)

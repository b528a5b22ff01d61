"""The lock between runs and garbage collection: shared by runs that begin or record a stage, exclusive for deletion.

So a run has recorded its process before garbage collection can consider the run dead, and has recorded a result before
garbage collection can find that no run uses it.
"""

import fcntl
import logging
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from luffy.pipeline.workspace import Workspace
from luffy.pipeline.workspace.space import usable

logger = logging.getLogger(__name__)
_FILE = ".claims.lock"


def claiming(workspace: Workspace) -> AbstractContextManager[None]:
    """Shared lock while a run begins, or decides on a stage and records it; waits for a deletion to end."""
    return _held(workspace, fcntl.LOCK_SH)


def disposing(workspace: Workspace) -> AbstractContextManager[None]:
    """Exclusive lock from the survey of garbage until it is renamed; no run begins or records a stage meanwhile."""
    return _held(workspace, fcntl.LOCK_EX)


@contextmanager
def _held(workspace: Workspace, mode: int) -> Iterator[None]:
    with usable(workspace.root):
        descriptor = os.open(workspace.root / _FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(descriptor, mode | fcntl.LOCK_NB)
        except BlockingIOError:
            other = "`luffy gc`, which decides what to delete" if mode == fcntl.LOCK_SH else "runs that begin a stage"
            logger.warning("waiting in %s for %s", workspace.root, other)
            fcntl.flock(descriptor, mode)
        yield
    finally:
        os.close(descriptor)

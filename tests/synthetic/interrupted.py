"""What a kill leaves of an evaluation, at a chosen place and without waiting for it."""

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

_STEPS = ("os.rename", "os.remove", "os.rmdir", "os.truncate")
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT


@contextmanager
def answers_stay() -> Iterator[None]:
    """Inside, evaluations keep their answers, as if they were killed before they remove them."""
    remove = Path.unlink

    def remove_others(path: Path, missing_ok: bool = False) -> None:
        if path.name != "answers.jsonl":
            remove(path, missing_ok)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "unlink", remove_others)
        yield


def killed_before(step: int, work: Callable[[], object]) -> bool:
    """Do `work` as a process does it that is killed before its file operation of that number: no later one happens.

    Returns whether it was; False: it had ended by then. Nothing tidies up either: what would is refused, too.
    """
    if not _hook_is_set:
        sys.addaudithook(_refuse)
        _hook_is_set.append(True)
    _left.append(step)
    try:
        work()
    except _Killed:
        return True
    finally:
        _left.clear()
    return False


class _Killed(BaseException):
    """Nobody catches it by accident."""


_hook_is_set: list[bool] = []
_left: list[int] = []
"""File operations that are still allowed; empty while nobody is to be killed."""


def _refuse(event: str, arguments: tuple[object, ...]) -> None:
    if _left and _changes_files(event, arguments) and threading.current_thread() is threading.main_thread():
        if not _left[0]:
            raise _Killed
        _left[0] -= 1


def _changes_files(event: str, arguments: tuple[object, ...]) -> bool:
    if event != "open":
        return event in _STEPS
    flags = arguments[2]
    return isinstance(flags, int) and bool(flags & _WRITING)

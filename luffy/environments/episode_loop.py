"""The event loop of episodes: `run_in_loop(coroutine)` is asyncio.run without waiting for threads at its end.

asyncio.run joins the threads of `asyncio.to_thread`, so one that hangs would block the run forever, long after its
episode has failed.
"""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

_Result = TypeVar("_Result")
_MOST_AT_ONCE = 32
"""Calls that run at the same time; one that hangs keeps its place."""


def run_in_loop(main: Coroutine[Any, Any, _Result]) -> _Result:
    """The coroutine's result."""
    with asyncio.Runner() as runner:
        runner.get_loop().set_default_executor(_DaemonThreads())
        return runner.run(main)


class _DaemonThreads(ThreadPoolExecutor):
    """A daemon thread for each call; asyncio accepts only executors of this base class."""

    def __init__(self) -> None:
        super().__init__()
        self._places = threading.Semaphore(_MOST_AT_ONCE)

    def submit(self, fn: Callable[..., _Result], /, *args: Any, **kwargs: Any) -> "Future[_Result]":
        future: Future[_Result] = Future()

        def work() -> None:
            with self._places:
                if not future.set_running_or_notify_cancel():
                    return
                try:
                    future.set_result(fn(*args, **kwargs))
                except BaseException as error:  # noqa: BLE001 - whoever awaits the call has to be told
                    future.set_exception(error)

        threading.Thread(target=work, name="episode", daemon=True).start()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Without effect: nobody waits for the threads."""

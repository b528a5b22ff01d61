"""Limits of what a user's code may take: time for a call, threads, and failed episodes.

Python cannot end a thread. One that runs past its limit goes on, unseen, until its function returns; `LimitedCalls`
counts these, and once there are too many it refuses further calls: episodes end as failed instead of filling the
process with threads. A function that may hang should have a limit of its own. An asynchronous one that never awaits
holds up the whole event loop, and no limit here can end it.
"""

import asyncio
import contextlib
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, Generic, TypeVar, cast

from luffy.config.environment import EpisodeLimits
from luffy.environments.environment import Environment
from luffy.errors import EnvironmentFault, LuffyError
from luffy.types import FinishReason

MOST_HANGING = 32
"""Calls past their time limit that may still run in this process."""
FEWEST_EPISODES = 32
"""A running count is treated as at least this many episodes: one failure among the first few says little."""
_MOST_AT_ONCE = 32
"""Calls of `asyncio.to_thread` that run at the same time; one that hangs keeps its place."""
_Result = TypeVar("_Result")


class LateCall(Exception):
    """A call did not end within its time limit; the message names both."""


@dataclass(frozen=True, slots=True)
class Ended(Generic[_Result]):
    """How a call ended: with a result, or with what it raised."""

    value: _Result | None = None
    error: BaseException | None = None

    def result(self) -> _Result:
        if self.error is not None:
            raise self.error
        return cast(_Result, self.value)


class LimitedCalls:
    """Calls functions: asynchronous ones in the event loop, each other one in its own thread.

    Shared by many episodes, in one event loop at a time. `setting` names the limit in messages. No more than
    `most_threads` run at once, those past their limit not counted; the time that a call waits for its thread does not
    count towards its limit.
    """

    def __init__(self, setting: str, most_threads: int | None = None) -> None:
        self._setting = setting
        self._most_threads = most_threads
        self._hanging: list[tuple[str, Future[Any] | asyncio.Future[Any]]] = []
        self._places: tuple[asyncio.AbstractEventLoop, asyncio.Semaphore] | None = None

    async def in_thread(self, name: str, function: Callable[[], _Result], timeout_s: float | None) -> Ended[_Result]:
        """Call `function` in a thread that the interpreter does not wait for at its end; LateCall past the limit."""

        def ended() -> Ended[_Result]:
            try:
                return Ended(function())
            except BaseException as error:  # noqa: BLE001 - whatever ends the function, the episode has to be told
                return Ended(error=error)

        if self._most_threads is None:
            place: contextlib.AbstractAsyncContextManager[None] = contextlib.nullcontext()
        else:
            loop = asyncio.get_running_loop()
            if self._places is None or self._places[0] is not loop:
                self._places = loop, asyncio.Semaphore(self._most_threads)
            place = self._places[1]
        async with place:
            running = _in_daemon_thread(ended, "limited call")
            return await self._ended(name, asyncio.wrap_future(running), running, timeout_s)

    async def in_loop(
        self, name: str, function: Callable[[], Awaitable[_Result]], timeout_s: float | None
    ) -> Ended[_Result]:
        """Await what `function` returns; LateCall past the limit, and the function is then cancelled."""

        async def ended() -> Ended[_Result]:
            try:
                return Ended(await function())
            except (Exception, SystemExit) as error:  # noqa: BLE001 - it may raise anything; it must not end the loop
                return Ended(error=error)

        task = asyncio.ensure_future(ended())
        return await self._ended(name, task, task, timeout_s)

    async def _ended(
        self,
        name: str,
        outcome: asyncio.Future[Ended[_Result]],
        running: Future[Ended[_Result]] | asyncio.Future[Ended[_Result]],
        timeout_s: float | None,
    ) -> Ended[_Result]:
        try:
            await asyncio.wait({outcome}, timeout=timeout_s)
            if not outcome.done():
                raise LateCall(f"{name} did not end within {timeout_s:g} s")
        finally:
            if not outcome.done():  # past the limit, or the episode was cancelled
                outcome.cancel()
                self._hanging.append((name, running))
        return Ended(error=asyncio.CancelledError()) if outcome.cancelled() else outcome.result()

    def refuse_when_full(self) -> None:
        """Raise LuffyError when too many calls still run past their limit."""
        self._hanging = [(name, running) for name, running in self._hanging if not running.done()]
        if len(self._hanging) >= MOST_HANGING:
            names = Counter(name for name, _ in self._hanging)
            listed = ", ".join(f"{name} ({count})" for name, count in names.most_common())
            raise LuffyError(
                f"{len(self._hanging)} calls still run past {self._setting}: {listed}; "
                "give these functions a time limit of their own"
            )


def run_in_loop(main: Coroutine[Any, Any, _Result]) -> _Result:
    """The coroutine's result, as by asyncio.run, but without waiting for threads at the end.

    asyncio.run joins the threads of `asyncio.to_thread`, so one that hangs would block the run forever, long after its
    episode has failed.
    """
    with asyncio.Runner() as runner:
        runner.get_loop().set_default_executor(_DaemonThreads())
        return runner.run(main)


class _DaemonThreads(ThreadPoolExecutor):
    """A daemon thread for each call; asyncio accepts only executors of this base class."""

    def __init__(self) -> None:
        super().__init__()
        self._places = threading.Semaphore(_MOST_AT_ONCE)

    def submit(self, fn: Callable[..., _Result], /, *args: Any, **kwargs: Any) -> "Future[_Result]":
        return _in_daemon_thread(lambda: fn(*args, **kwargs), "episode", self._places)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Without effect: nobody waits for the threads."""


def _in_daemon_thread(
    function: Callable[[], _Result], name: str, places: contextlib.AbstractContextManager[object] | None = None
) -> "Future[_Result]":
    """Call the function in a thread of its own, which holds a place of `places` while it runs."""
    future: Future[_Result] = Future()

    def work() -> None:
        with places or contextlib.nullcontext():
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(function())
            except BaseException as error:  # noqa: BLE001 - whoever awaits the call has to be told
                future.set_exception(error)

    threading.Thread(target=work, name=name, daemon=True).start()
    return future


def with_time_limit(environment: Environment, timeout_s: float) -> Environment:
    """The environment; its asynchronous methods are cancelled after `timeout_s` seconds each and raise LateCall."""
    limited = SimpleNamespace(counts=environment.counts)
    for name in ("reset", "respond", "score", "close"):
        if (method := getattr(environment, name, None)) is not None:  # not every environment scores
            setattr(limited, name, partial(_in_time, method, name, timeout_s))
    return cast(Environment, limited)


async def _in_time(
    method: Callable[..., Awaitable[_Result]], name: str, timeout_s: float, *arguments: object
) -> _Result:
    timeout = asyncio.timeout(timeout_s)
    try:
        async with timeout:
            return await method(*arguments)
    except TimeoutError as error:
        if not timeout.expired():  # the method's own
            raise
        raise LateCall(f"{name} did not end within {timeout_s:g} s (environment.timeout_s)") from error


def refuse_failures(reasons: Sequence[FinishReason], limits: EpisodeLimits) -> None:
    """Raise EnvironmentFault when the environment failed in more than the allowed share of these episodes."""
    _refuse(reasons.count(FinishReason.ENVIRONMENT_ERROR), len(reasons), len(reasons), limits)


class FailedShare:
    """Counts the episodes of a suite, or of a teacher, batch by batch."""

    def __init__(self, limits: EpisodeLimits) -> None:
        self._limits = limits
        self._failed = 0
        self._episodes = 0

    def add(self, failed: Sequence[bool]) -> None:
        """Count a batch, given for each episode whether its environment failed.

        Raises EnvironmentFault when more than the allowed share of all episodes so far failed
        (`environment.limits.max_failed_share`). A batch without failures never raises, so a resumed stage can continue
        once the environment is repaired.
        """
        self._failed += sum(failed)
        self._episodes += len(failed)
        _refuse(self._failed, self._episodes, max(self._episodes, FEWEST_EPISODES), self._limits)


def _refuse(failed: int, episodes: int, compared: int, limits: EpisodeLimits) -> None:
    if failed > limits.max_failed_share * compared:
        raise EnvironmentFault(
            f"the environment failed in {failed} of {episodes} episodes (the log has its exceptions); "
            f"allowed is a share of {limits.max_failed_share:g} (environment.limits.max_failed_share)"
        )

"""Calls of functions that a user has written, with a time limit.

Asynchronous functions run in the event loop, each other one in its own thread.

Python cannot end a thread. One that runs past its limit goes on, unseen, until its function returns; `LimitedCalls`
counts these, and once there are too many it refuses further calls: episodes end as failed instead of filling the
process with threads. A function that may hang should have a limit of its own. An asynchronous one that never awaits
holds up the whole event loop, and no limit here can end it.
"""

import asyncio
import contextlib
import threading
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Generic, TypeVar, cast

from luffy.errors import LuffyError

MOST_HANGING = 32
"""Calls past their time limit that may still run in this process."""
_Result = TypeVar("_Result")


class LateCall(Exception):
    """A call did not end within its time limit; the message names both."""


@dataclass(frozen=True, slots=True)
class Ended(Generic[_Result]):
    """How a call ended: with a result, or with what it raised."""

    value: _Result | None = None
    error: BaseException | None = None

    def result(self) -> _Result:
        """The result; raises what the call raised."""
        if self.error is not None:
            raise self.error
        return cast(_Result, self.value)


@dataclass(frozen=True, slots=True)
class _Hanging:
    name: str
    is_alive: Callable[[], bool]


class LimitedCalls:
    """Calls functions; shared by many episodes, in one event loop at a time.

    `setting` names the limit in messages. No more than `most_threads` run at once, those past their limit not counted;
    the time that a call waits for its thread does not count towards its limit.
    """

    def __init__(self, setting: str, most_threads: int | None = None) -> None:
        self._setting = setting
        self._most_threads = most_threads
        self._hanging: list[_Hanging] = []
        self._places: tuple[asyncio.AbstractEventLoop, asyncio.Semaphore] | None = None

    async def in_thread(self, name: str, function: Callable[[], _Result], timeout_s: float | None) -> Ended[_Result]:
        """Call `function` in a thread that the interpreter does not wait for at its end; LateCall past the limit."""
        async with self._place():
            delivered, thread = _started(function)
            return await self._ended(delivered, _Hanging(name, thread.is_alive), timeout_s)

    async def in_loop(
        self, name: str, function: Callable[[], Awaitable[_Result]], timeout_s: float | None
    ) -> Ended[_Result]:
        """Await what `function` returns; LateCall past the limit, and the function is then cancelled."""
        task = asyncio.ensure_future(_awaited(function))
        return await self._ended(task, _Hanging(name, lambda: not task.done()), timeout_s)

    def _place(self) -> AbstractAsyncContextManager[None]:
        if self._most_threads is None:
            return contextlib.nullcontext()
        loop = asyncio.get_running_loop()
        if self._places is None or self._places[0] is not loop:
            self._places = loop, asyncio.Semaphore(self._most_threads)
        return self._places[1]

    async def _ended(
        self, outcome: asyncio.Future[Ended[_Result]], call: _Hanging, timeout_s: float | None
    ) -> Ended[_Result]:
        try:
            await asyncio.wait({outcome}, timeout=timeout_s)
            if not outcome.done():
                raise LateCall(f"{call.name} did not end within {timeout_s:g} s")
        finally:
            if not outcome.done():  # past the limit, or the episode was cancelled
                outcome.cancel()
                self._hanging.append(call)
        return Ended(error=asyncio.CancelledError()) if outcome.cancelled() else outcome.result()

    def refuse_when_full(self) -> None:
        """Raise LuffyError when too many calls still run past their limit."""
        self._hanging = [call for call in self._hanging if call.is_alive()]
        if len(self._hanging) >= MOST_HANGING:
            names = Counter(call.name for call in self._hanging)
            listed = ", ".join(f"{name} ({count})" for name, count in names.most_common())
            raise LuffyError(
                f"{len(self._hanging)} calls still run past {self._setting}: {listed}; "
                "give these functions a time limit of their own"
            )


def _started(function: Callable[[], _Result]) -> tuple[asyncio.Future[Ended[_Result]], threading.Thread]:
    loop = asyncio.get_running_loop()
    delivered: asyncio.Future[Ended[_Result]] = loop.create_future()

    def deliver(outcome: Ended[_Result]) -> None:
        if not delivered.done():
            delivered.set_result(outcome)

    def work() -> None:
        try:
            outcome = Ended(function())
        except BaseException as error:  # noqa: BLE001 - whatever ends the function, the episode has to be told
            outcome = Ended(error=error)
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(deliver, outcome)

    thread = threading.Thread(target=work, name="limited call", daemon=True)
    thread.start()
    return delivered, thread


async def _awaited(function: Callable[[], Awaitable[_Result]]) -> Ended[_Result]:
    try:
        return Ended(await function())
    except (Exception, SystemExit) as error:  # noqa: BLE001 - the function may raise anything; it must not end the loop
        return Ended(error=error)

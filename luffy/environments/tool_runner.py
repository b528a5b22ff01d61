"""Calls of tools with a time limit: asynchronous ones in the event loop, others in a thread each.

Python cannot end a thread. One that runs past its limit goes on, unseen, until its function returns; `ToolRunner`
counts these, and once there are too many, environments refuse further calls: their episodes end as failed instead of
filling the process with threads. A tool that may hang should have a limit of its own, and code of the policy
belongs into a sandbox and not into a thread.
"""

import asyncio
import contextlib
import inspect
import json
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import cast

from luffy.errors import LuffyError, UserError

MOST_HANGING = 32
"""Calls past their time limit that may still run in this process."""
_MAX_MESSAGE = 500
"""Characters of an exception's message that the policy is shown."""


class ToolFault(StrEnum):
    """What went wrong with a call; the policy is told, and each is counted."""

    BROKEN_CALL = "broken_call"
    """The turn holds something that was meant as a call and cannot be read."""
    UNKNOWN_TOOL = "unknown_tool"
    WRONG_ARGUMENTS = "wrong_arguments"
    RAISED = "raised"
    """The function raised an exception."""
    TIMED_OUT = "timed_out"
    NOT_RUN = "not_run"
    """The turn had more calls than are allowed."""


class ToolError(Exception):
    """For tools to raise: the message is shown to the policy as it is, and the call counts as failed."""


class FailedCall(Exception):
    """A call has no result; the message is for the policy."""

    def __init__(self, fault: ToolFault, message: str, prefix: str = "Error: ") -> None:
        super().__init__(prefix + message)
        self.fault = fault


_Outcome = str | FailedCall | LuffyError
"""The result of a call, the failure that the policy is told, or an error of something that the tool depends on."""


@dataclass(frozen=True, slots=True)
class _Hanging:
    name: str
    is_alive: Callable[[], bool]


class ToolRunner:
    """Runs functions; shared by the episodes of an environment, in one event loop at a time."""

    def __init__(self) -> None:
        self._hanging: list[_Hanging] = []

    async def run(
        self,
        name: str,
        function: Callable[..., object],
        arguments: Mapping[str, object],
        *,
        is_async: bool,
        timeout_s: float | None,
    ) -> str:
        """Return the function's result as text; FailedCall when it raises, or does not end in time.

        A LuffyError of the function is not shown to the policy but raised: something that the tool depends on failed.
        """
        if is_async:
            task = asyncio.ensure_future(_awaited(name, function, arguments))
            return await self._result(task, _Hanging(name, lambda: not task.done()), timeout_s)
        delivered, thread = _started(name, function, arguments)
        return await self._result(delivered, _Hanging(name, thread.is_alive), timeout_s)

    async def _result(self, outcome: asyncio.Future[_Outcome], call: _Hanging, timeout_s: float | None) -> str:
        try:
            await asyncio.wait({outcome}, timeout=timeout_s)
            if not outcome.done():
                raise FailedCall(ToolFault.TIMED_OUT, f"{call.name} did not end within {timeout_s:g} s")
        finally:
            if not outcome.done():  # past the limit, or the episode was cancelled
                outcome.cancel()
                self._hanging.append(call)
        found = FailedCall(ToolFault.RAISED, "CancelledError") if outcome.cancelled() else outcome.result()
        if isinstance(found, FailedCall | LuffyError):
            raise found
        return found

    def refuse_when_full(self) -> None:
        """Raise LuffyError when too many calls still run past their limit."""
        self._hanging = [call for call in self._hanging if call.is_alive()]
        if len(self._hanging) >= MOST_HANGING:
            names = Counter(call.name for call in self._hanging)
            listed = ", ".join(f"{name} ({count})" for name, count in names.most_common())
            raise LuffyError(
                f"{len(self._hanging)} calls of tools still run past environment.timeout_s: {listed}; "
                "give these functions a time limit of their own"
            )


def _started(
    name: str, function: Callable[..., object], arguments: Mapping[str, object]
) -> tuple[asyncio.Future[_Outcome], threading.Thread]:
    """Run a function in a thread that the interpreter does not wait for at its end."""
    loop = asyncio.get_running_loop()
    delivered: asyncio.Future[_Outcome] = loop.create_future()

    def deliver(outcome: _Outcome) -> None:
        if not delivered.done():
            delivered.set_result(outcome)

    def work() -> None:
        try:
            outcome: _Outcome = _as_text(name, function(**arguments))
        except BaseException as error:  # noqa: BLE001 - whatever ends the function, the episode has to be told
            outcome = _raised(error)
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(deliver, outcome)

    thread = threading.Thread(target=work, name="tool", daemon=True)
    thread.start()
    return delivered, thread


async def _awaited(name: str, function: Callable[..., object], arguments: Mapping[str, object]) -> _Outcome:
    try:
        return _as_text(name, await cast(Awaitable[object], function(**arguments)))
    except (Exception, SystemExit) as error:  # noqa: BLE001 - a tool may raise anything; it must not end the loop
        return _raised(error)


def _as_text(name: str, value: object) -> str:
    if isinstance(value, str):
        return str(value)
    if inspect.isawaitable(value):
        if inspect.iscoroutine(value):
            value.close()
        raise UserError(f"{name} returns an awaitable, so it has to be defined with `async def`")
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        return str(value)


def _raised(error: BaseException) -> FailedCall | LuffyError:
    if isinstance(error, LuffyError):
        return error
    if isinstance(error, ToolError):
        return FailedCall(ToolFault.RAISED, str(error), prefix="")
    kind = type(error).__name__
    try:
        message = str(error)[:_MAX_MESSAGE]
    except Exception:  # noqa: BLE001 - an exception of the tool's own may not even have a text
        message = ""
    return FailedCall(ToolFault.RAISED, f"{kind}: {message}" if message else kind)

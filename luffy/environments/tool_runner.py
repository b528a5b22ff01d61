"""Calls of tools: their results as text, and their failures as messages to the policy.

A tool that may hang should have a limit of its own (`limited_calls.py` says why), and code of the policy belongs into a
sandbox and not into a thread.
"""

import asyncio
import inspect
import json
from collections.abc import Awaitable, Callable, Mapping
from enum import StrEnum
from typing import cast

from luffy.environments.limited_calls import LateCall, LimitedCalls
from luffy.errors import LuffyError, UserError

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


class ToolRunner:
    """Runs functions; shared by the episodes of an environment, in one event loop at a time."""

    def __init__(self) -> None:
        self._calls = LimitedCalls("environment.timeout_s")

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

        def in_thread() -> str:
            return _as_text(name, function(**arguments))

        async def in_loop() -> str:
            return _as_text(name, await cast(Awaitable[object], function(**arguments)))

        try:
            if is_async:
                ended = await self._calls.in_loop(name, in_loop, timeout_s)
            else:
                ended = await self._calls.in_thread(name, in_thread, timeout_s)
        except LateCall as late:
            raise FailedCall(ToolFault.TIMED_OUT, str(late)) from None
        if ended.error is not None:
            raise _failure(ended.error)
        return ended.result()

    def refuse_when_full(self) -> None:
        """Raise LuffyError when too many calls still run past their limit."""
        self._calls.refuse_when_full()


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


def _failure(error: BaseException) -> FailedCall | LuffyError:
    if isinstance(error, LuffyError):
        return error
    if isinstance(error, asyncio.CancelledError):  # of a task of the tool's own
        return FailedCall(ToolFault.RAISED, "CancelledError")
    if isinstance(error, ToolError):
        return FailedCall(ToolFault.RAISED, str(error), prefix="")
    kind = type(error).__name__
    try:
        message = str(error)[:_MAX_MESSAGE]
    except Exception:  # noqa: BLE001 - an exception of the tool's own may not even have a text
        message = ""
    return FailedCall(ToolFault.RAISED, f"{kind}: {message}" if message else kind)

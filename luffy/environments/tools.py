"""The environment of tools: it runs the calls of each turn and answers with their results.

A turn without a call ends the episode. A call that fails is answered by a message that begins with `Error:` and says
why: the policy can try again. A tool that may hang should have a limit of its own (`limits.py` says why), and code of
the policy belongs into a sandbox and not into a thread.
"""

import asyncio
import inspect
import json
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from enum import StrEnum
from typing import cast

from luffy.config.environment import ToolsEnvironment
from luffy.environments.call_formats import CALL_FORMATS, BrokenCall, FoundCall
from luffy.environments.environment import EpisodeState, ToolError, writable
from luffy.environments.limits import LateCall, LimitedCalls
from luffy.environments.tool_functions import Tool, WrongArguments
from luffy.errors import LuffyError, UserError
from luffy.grading.request import Problem
from luffy.sandbox import ExecutionStatus, PythonSession
from luffy.types import Message

logger = logging.getLogger(__name__)
_SESSION = "python session"
_MAX_NAME = 80
_MAX_MESSAGE = 500
"""Characters of an exception's message that the policy is shown."""
MAX_CALLS = 16
"""Calls in one turn; a message reports how many were not run."""
MAX_RESULT = 8192
"""Characters of a call's result; a longer one is truncated in the middle and marked as truncated."""


class ToolFault(StrEnum):
    """What went wrong with a call; the policy is told, and each is counted."""

    BROKEN_CALL = "broken_call"
    """The turn holds something that was meant as a call and cannot be read."""
    UNKNOWN_TOOL = "unknown_tool"
    WRONG_ARGUMENTS = "wrong_arguments"
    RAISED = "raised"
    TIMED_OUT = "timed_out"
    NOT_RUN = "not_run"
    """The turn had more calls than are allowed."""


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
        error = ended.error
        if error is None:
            return ended.result()
        if isinstance(error, LuffyError):
            raise error
        if isinstance(error, asyncio.CancelledError):  # of a task of the tool's own
            raise FailedCall(ToolFault.RAISED, "CancelledError")
        if isinstance(error, ToolError):
            raise FailedCall(ToolFault.RAISED, str(error), prefix="")
        kind = type(error).__name__
        try:
            message = str(error)[:_MAX_MESSAGE]
        except Exception:  # noqa: BLE001 - an exception of the tool's own may not even have a text
            message = ""
        raise FailedCall(ToolFault.RAISED, f"{kind}: {message}" if message else kind)

    def refuse_when_full(self) -> None:
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


class ToolEpisode:
    """An episode with tools; an `Environment`."""

    def __init__(self, config: ToolsEnvironment, tools: Mapping[str, Tool], runner: ToolRunner) -> None:
        self._config = config
        self._tools = tools
        self._runner = runner
        self._syntax = CALL_FORMATS[config.calls]
        self._state = EpisodeState(Problem())
        self._calls: Counter[str] = Counter()
        self._faults: Counter[ToolFault] = Counter()
        self._num_cut = 0

    async def reset(self, problem: Problem) -> Sequence[Message]:
        self._state = EpisodeState(problem)
        return ()

    async def respond(self, conversation: Sequence[Message]) -> Sequence[Message] | None:
        """Run the calls of the newest turn in order. LuffyError when too many earlier calls still run."""
        found = self._syntax.parse(conversation[-1].content)
        if not found:
            return None
        run, left = found[:MAX_CALLS], len(found) - MAX_CALLS
        results = [await self._answer(call) for call in run]
        if left > 0:
            self._faults[ToolFault.NOT_RUN] += left
            results.append(f"Error: {left} more calls were not run; a turn may have {MAX_CALLS}")
        return self._syntax.results(results)

    def counts(self) -> Mapping[str, float]:
        """Calls, errors and cut results, in all and by tool and kind; a name is there from the start, with 0."""
        errors = {f"tool_errors/{fault}": float(self._faults[fault]) for fault in ToolFault}
        calls = {f"tool_calls/{name}": float(self._calls[name]) for name in self._tools}
        never_ran = (ToolFault.BROKEN_CALL, ToolFault.UNKNOWN_TOOL, ToolFault.NOT_RUN)
        num_unrun = sum(self._faults[fault] for fault in never_ran)
        return {
            "tool_calls": float(self._calls.total() + num_unrun),
            "tool_errors": float(self._faults.total()),
            "tool_results_cut": float(self._num_cut),
            **calls,
            **errors,
        }

    async def close(self) -> None:
        """Free what the tools registered with `EpisodeState.on_close`; what fails is logged."""
        for closing in self._state.end():
            name = str(getattr(closing, "__qualname__", type(closing).__name__))
            is_async = inspect.iscoroutinefunction(closing)
            try:
                await self._runner.run(name, closing, {}, is_async=is_async, timeout_s=self._config.timeout_s)
            except (FailedCall, LuffyError) as fault:
                logger.warning("closing an episode: %s: %s", name, fault)

    async def _answer(self, call: FoundCall) -> str:
        """The result of a call, or its error, without what cannot be written, and cut in the middle if it is long."""
        try:
            text = await self._result(call)
        except FailedCall as failed:
            self._faults[failed.fault] += 1
            text = str(failed)
        if len(text) > MAX_RESULT:
            self._num_cut += 1
            half = MAX_RESULT // 2
            text = f"{text[:half]}\n... [{len(text) - 2 * half} characters left out] ...\n{text[len(text) - half :]}"
        return writable(text)

    async def _result(self, call: FoundCall) -> str:
        if isinstance(call, BrokenCall):
            raise FailedCall(ToolFault.BROKEN_CALL, f"this call cannot be read: {call.reason}")
        tool = self._tools.get(call.name)
        if tool is None:
            known = ", ".join(self._tools)
            raise FailedCall(ToolFault.UNKNOWN_TOOL, f"there is no tool {call.name[:_MAX_NAME]!r}; there are: {known}")
        self._calls[tool.name] += 1
        try:
            arguments = tool.read(call.arguments)
        except WrongArguments as fault:
            raise FailedCall(ToolFault.WRONG_ARGUMENTS, f"{tool.name}: {fault}") from None
        if tool.state_parameter is not None:
            arguments[tool.state_parameter] = self._state
        self._runner.refuse_when_full()
        timeout_s = None if tool.limits_itself else self._config.timeout_s
        return await self._runner.run(tool.name, tool.function, arguments, is_async=tool.is_async, timeout_s=timeout_s)


def python_tool(open_session: Callable[[], Awaitable[PythonSession]]) -> Callable[..., Awaitable[str]]:
    """Return the function of the tool `python`: an interpreter of the episode's own, outside of this process.

    Its session is opened by the first call and closed with the episode; a call after its end opens another one. A
    LuffyError of `open_session` is a fault of the environment.
    """

    async def python(code: str, *, state: EpisodeState) -> str:
        """Run Python code and return what it prints and the value of its last line. Names are kept between calls.

        Args:
            code: Python code, as in a notebook cell.
        """
        session = cast(PythonSession | None, state.get(_SESSION))
        if session is None:
            session = await open_session()
            state.on_close(session.close)
            state[_SESSION] = session
        result = await session.run(code)
        if result.session_is_over:
            del state[_SESSION]
            await session.close()
        output = result.output.removesuffix("\n")
        if result.status is not ExecutionStatus.OK:
            raise ToolError(output)
        return output

    return python

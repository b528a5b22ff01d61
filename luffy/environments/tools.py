"""The environment of tools: it runs the calls of each turn and answers with their results.

A turn without a call ends the episode. A call that fails is answered by a message that begins with `Error:` and says
why: the policy can try again.
"""

import inspect
import logging
from collections import Counter
from collections.abc import Mapping, Sequence

from luffy.config.environment import ToolsEnvironment
from luffy.environments.call_formats import CALL_FORMATS, BrokenCall, FoundCall
from luffy.environments.episode_state import EpisodeState
from luffy.environments.received import writable
from luffy.environments.tool_functions import Tool, WrongArguments
from luffy.environments.tool_runner import FailedCall, ToolFault, ToolRunner
from luffy.errors import LuffyError
from luffy.grading.request import Problem
from luffy.types import Message

logger = logging.getLogger(__name__)

_WITHOUT_A_TOOL = (ToolFault.BROKEN_CALL, ToolFault.UNKNOWN_TOOL, ToolFault.NOT_RUN)
_MAX_NAME = 80


class ToolEpisode:
    """An episode with tools."""

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
        """Begin the episode."""
        self._state = EpisodeState(problem)
        return ()

    async def respond(self, conversation: Sequence[Message]) -> Sequence[Message] | None:
        """Run the calls of the newest turn in order. LuffyError when too many earlier calls still run."""
        found = self._syntax.parse(conversation[-1].content, self._tools)
        if not found:
            return None
        run, left = found[: self._config.max_calls], len(found) - self._config.max_calls
        results = [await self._answer(call) for call in run]
        if left > 0:
            self._faults[ToolFault.NOT_RUN] += left
            results.append(f"Error: {left} more calls were not run; a turn may have {self._config.max_calls}")
        return self._syntax.results(results)

    def counts(self) -> Mapping[str, float]:
        """Calls, errors and cut results, in all and by tool and kind; a name is there from the start, with 0."""
        errors = {f"tool_errors/{fault}": float(self._faults[fault]) for fault in ToolFault}
        calls = {f"tool_calls/{name}": float(self._calls[name]) for name in self._tools}
        num_unrun = sum(self._faults[fault] for fault in _WITHOUT_A_TOOL)
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
            name, is_async = _name_of(closing), inspect.iscoroutinefunction(closing)
            try:
                await self._runner.run(name, closing, {}, is_async=is_async, timeout_s=self._config.timeout_s)
            except (FailedCall, LuffyError) as fault:
                logger.warning("closing an episode: %s: %s", name, fault)

    async def _answer(self, call: FoundCall) -> str:
        try:
            return self._shown(await self._result(call))
        except FailedCall as failed:
            self._faults[failed.fault] += 1
            return self._shown(str(failed))

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

    def _shown(self, text: str) -> str:
        """The text with nothing that cannot be written, cut in the middle where it is too long."""
        limit = self._config.max_result_characters
        if len(text) > limit:
            self._num_cut += 1
            half = limit // 2
            text = f"{text[:half]}\n... [{len(text) - 2 * half} characters left out] ...\n{text[len(text) - half :]}"
        return writable(text)


def _name_of(closing: object) -> str:
    return str(getattr(closing, "__qualname__", type(closing).__name__))

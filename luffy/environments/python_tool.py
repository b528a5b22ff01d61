"""The tool `python`: an interpreter of the episode's own, which remembers names from call to call.

The code runs in a session that `open_session` starts, outside of this process and under limits of its own
(`luffy.sandbox`). The session is opened by the first call and closed with the episode; a call after its end opens
another one.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import cast

from luffy.config.environment import SandboxConfig
from luffy.environments.episode_state import EpisodeState
from luffy.environments.tool_runner import ToolError
from luffy.sandbox import ExecutionStatus, PythonSession, Sandbox, open_sandbox

_SESSION = "python session"


class SandboxOfLoop:
    """Opens the sandbox of a configuration once in each event loop, and sessions of it."""

    def __init__(self, config: SandboxConfig) -> None:
        self._config = config
        self._loop: asyncio.AbstractEventLoop | None = None
        self._opening: asyncio.Task[Sandbox] | None = None

    async def open_session(self) -> PythonSession:
        """Return a new session; LuffyError when the sandbox or the session does not start."""
        loop = asyncio.get_running_loop()
        if self._opening is None or loop is not self._loop:
            self._loop, self._opening = loop, loop.create_task(open_sandbox(self._config))
        sandbox = await asyncio.shield(self._opening)  # an episode that is cancelled does not cancel it for the others
        return await sandbox.open(self._config.limits)


def python_tool(open_session: Callable[[], Awaitable[PythonSession]]) -> Callable[..., Awaitable[str]]:
    """Return the function of the tool; a LuffyError of `open_session` is a fault of the environment."""

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

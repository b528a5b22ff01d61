"""The tool `python`: an interpreter of the episode's own, which remembers names from call to call.

The code runs in a session that `open_session` starts, outside of this process and under limits of its own
(`luffy.sandbox`). The session is opened by the first call and closed with the episode; a call after its end opens
another one.
"""

from collections.abc import Awaitable, Callable
from typing import Protocol, cast

from luffy.environments.episode_state import EpisodeState
from luffy.environments.tool_runner import ToolError

_SESSION = "python session"


class ExecutedCode(Protocol):
    """What one call did."""

    @property
    def output(self) -> str:
        """What the code printed, the value of its last expression, its traceback, and what ended the session."""
        ...

    @property
    def status(self) -> str:
        """`ok`, or how the call failed."""
        ...

    @property
    def session_is_over(self) -> bool:
        """Whether the interpreter has ended."""
        ...


class CodeSession(Protocol):
    """A persistent interpreter; it bounds the time, the memory and the output of every call by itself."""

    async def run(self, code: str) -> ExecutedCode:
        """Run `code`; never raises by what the code does."""
        ...

    async def close(self) -> None:
        """End the interpreter; may be called again."""
        ...


def python_tool(open_session: Callable[[], Awaitable[CodeSession]]) -> Callable[..., Awaitable[str]]:
    """Return the function of the tool; a LuffyError of `open_session` is a fault of the environment."""

    async def python(code: str, *, state: EpisodeState) -> str:
        """Run Python code and return what it prints and the value of its last line. Names are kept between calls.

        Args:
            code: Python code, as in a notebook cell.
        """
        session = cast(CodeSession | None, state.get(_SESSION))
        if session is None:
            session = await open_session()
            state.on_close(session.close)
            state[_SESSION] = session
        result = await session.run(code)
        if result.session_is_over:
            del state[_SESSION]
            await session.close()
        output = result.output.removesuffix("\n")
        if result.status != "ok":
            raise ToolError(output)
        return output

    return python

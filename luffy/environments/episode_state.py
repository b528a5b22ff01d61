"""The state that the tools of one episode share.

    def remember(key: str, value: str, *, state: EpisodeState) -> str:
        \"\"\"Keep a value for later.\"\"\"
        state[key] = value
        return "kept"

The environment passes the parameter: it is not part of the tool's schema, and the policy cannot set it.
A tool reports a failure to the policy by an exception: the policy sees the message of a `ToolError`, and type and
message of any other exception.
"""

from collections.abc import Callable, Sequence

from luffy.grading.request import Problem

Closing = Callable[[], object]
"""Frees something; may be an `async def`."""


class EpisodeState(dict[str, object]):
    """A dictionary of one episode, empty at its start. Tools in one turn run one after another, so it needs no lock."""

    def __init__(self, problem: Problem) -> None:
        super().__init__()
        self.problem = problem
        self._closings: list[Closing] | None = []

    def on_close(self, closing: Closing) -> None:
        """Call `closing` when the episode ends, before those that were registered earlier.

        Raises RuntimeError when the episode has ended, as it may have for a tool that ran past its time limit: the tool
        then has to free its resources itself.
        """
        if self._closings is None:
            raise RuntimeError("the episode has ended")
        self._closings.append(closing)

    def end(self) -> Sequence[Closing]:
        """Return the registered functions in the order to call them; nothing can be registered after that."""
        closings, self._closings = self._closings or [], None
        return closings[::-1]

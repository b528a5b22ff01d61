"""What the tools of one episode share.

    def remember(key: str, value: str, *, state: EpisodeState) -> str:
        \"\"\"Keep a value for later.\"\"\"
        state[key] = value
        return "kept"

The parameter is given by the environment: it is not part of the tool's schema, and the policy cannot pass it.
A tool tells the policy of a failure by an exception: of `ToolError` it is shown the message alone, of any other one its
type and message.
"""

from collections.abc import Callable, Sequence

from luffy.grading import Problem

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

        RuntimeError when the episode has ended, which a tool that ran past its time limit may meet: it then has to free
        what it holds itself.
        """
        if self._closings is None:
            raise RuntimeError("the episode has ended")
        self._closings.append(closing)

    def end(self) -> Sequence[Closing]:
        """Return what has to be called, in order; nothing can be registered after that."""
        closings, self._closings = self._closings or [], None
        return closings[::-1]

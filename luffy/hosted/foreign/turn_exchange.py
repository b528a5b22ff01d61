"""Passes the policy's turns from the other side to a rollout, which requests them whenever it wants."""

import asyncio
from collections.abc import Coroutine

from luffy.hosted.foreign.faults import EpisodeFault, line_of
from luffy.hosted.foreign.plain_messages import PlainMessage, Turn

_CLOSE_S = 5.0
"""Limit for an episode that is closed before its end to clean up after itself."""


class TurnExchange:
    """One rollout, which waits for the policy's turns."""

    def __init__(self, prompt: list[PlainMessage] | None) -> None:
        """`prompt`: the messages that both sides know before the first turn; None: those of the first request."""
        self._seen = prompt
        self._num_turns = 0
        self._requests: asyncio.Queue[list[PlainMessage] | None] = asyncio.Queue()
        """The messages before each turn that the other side does not know; None when the rollout has ended."""
        self._turns: asyncio.Queue[Turn | None] = asyncio.Queue()
        """The policy's turns; None: there will be no other."""

    def start(self, rollout: Coroutine[None, None, None]) -> asyncio.Task[None]:
        """Run `rollout`, which calls `ask` for each turn."""
        self._rollout = asyncio.create_task(self._run(rollout))
        return self._rollout

    async def begin(self) -> list[PlainMessage]:
        """The messages that follow the prompt; EpisodeFault if the rollout failed before its first request."""
        return await self._requested() or []

    async def respond(self, turn: Turn) -> list[PlainMessage] | None:
        """The answer to a turn; None when the episode is over."""
        if self._rollout.done():
            raise EpisodeFault("the episode is over and takes no further turn")
        self._turns.put_nowait(turn)
        return await self._requested()

    async def finish(self) -> None:
        """Let the rollout end without further turns; EpisodeFault if it failed."""
        self._turns.put_nowait(None)
        await asyncio.wait([self._rollout])
        self._raise_fault()

    async def close(self) -> None:
        """End the rollout if it has not ended, cleanly if that does not take long."""
        self._turns.put_nowait(None)
        await asyncio.wait([self._rollout], timeout=_CLOSE_S)
        await self.cancel()

    async def cancel(self) -> None:
        """End the rollout at once."""
        self._rollout.cancel()
        await asyncio.gather(self._rollout, return_exceptions=True)

    @property
    def seen(self) -> list[PlainMessage]:
        """The conversation so far."""
        return self._seen or []

    async def ask(self, messages: list[PlainMessage]) -> Turn | None:
        """The policy's next turn in the conversation `messages`; None if there will be no other."""
        if self._seen is None:
            self._seen = messages
        known = len(self._seen)
        if messages[:known] != self._seen:
            raise EpisodeFault(
                "the environment rewrites earlier messages or begins another conversation, and a response can only be "
                "extended"
            )
        if self._num_turns and any(message["role"] == "assistant" for message in messages[known:]):
            raise EpisodeFault("the environment writes turns of the policy")
        self._requests.put_nowait(messages[known:])
        turn = await self._turns.get()
        if turn is None:
            self._turns.put_nowait(None)
        else:
            self._num_turns += 1
            self._seen = [*messages, {"role": "assistant", "content": turn["text"]}]
        return turn

    async def _run(self, rollout: Coroutine[None, None, None]) -> None:
        try:
            await rollout
        finally:  # later, when this task is done
            asyncio.get_running_loop().call_soon(self._requests.put_nowait, None)

    async def _requested(self) -> list[PlainMessage] | None:
        """Wait for the next request, or None for the end of the rollout; raises what ended it."""
        found = await self._requests.get()
        if found is None:
            self._raise_fault()
        return found

    def _raise_fault(self) -> None:
        if self._rollout.cancelled():
            raise EpisodeFault("the episode was cancelled")
        fault = self._rollout.exception()
        if fault is not None and not isinstance(fault, EpisodeFault):
            raise EpisodeFault(line_of(fault)) from fault
        if fault is not None:
            raise fault

"""What both versions of verifiers share: faults, plain messages, the channel to the other side, and turns by request.

The other side's requests are JSON lines on standard input, answered on standard output.
"""

import asyncio
import json
import os
import threading
import traceback
from collections.abc import Coroutine
from typing import Any, Protocol, TextIO

PlainMessage = dict[str, str]
"""`role` and `content`."""
Turn = dict[str, Any]
"""A turn of the policy: `text`, `calls` (each with `name` and `arguments`, a text), and `is_cut`."""
_QUIT_S = 10.0
"""Limit of the environment's own teardown."""
_CLOSE_S = 5.0
"""Limit for an episode that is closed before its end to clean up after itself."""


class Unusable(Exception):
    """The environment cannot be used here; the message is one line for the user."""


class TaskFault(Exception):
    """There is no such task, or it has changed; the message is one line for the user."""


class EpisodeFault(Exception):
    """The environment failed in one episode."""


def line_of(error: BaseException) -> str:
    """Type, message and cause of an exception in one line."""
    cause = f" ({line_of(error.__cause__)})" if error.__cause__ is not None else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:500]}{cause}"


def plain(message: Any) -> PlainMessage:
    """Role and text of a message; EpisodeFault if it holds more than text."""
    message = message if isinstance(message, dict) else message.model_dump()
    content = message.get("content")
    if isinstance(content, list):
        parts = [part if isinstance(part, dict) else part.model_dump() for part in content]
        if any(not isinstance(part.get("text"), str) for part in parts):
            raise EpisodeFault("a message of the environment holds more than text")
        content = "".join(part["text"] for part in parts)
    return {"role": str(message["role"]), "content": content or ""}


def plain_tool(tool: Any) -> dict[str, Any]:
    """A tool in the form of OpenAI's protocol."""
    tool = tool if isinstance(tool, dict) else tool.model_dump()
    function = tool.get("function", tool)
    kept = {key: function[key] for key in ("name", "description", "parameters") if key in function}
    return {"type": "function", "function": kept}


def chat_completion(turn: Turn) -> dict[str, Any]:
    """A turn as the body of a response of OpenAI's protocol; the text keeps the calls."""
    functions = [
        {"id": f"call_{place}", "type": "function", "function": {name: call[name] for name in ("name", "arguments")}}
        for place, call in enumerate(turn["calls"])
    ]
    message = {"role": "assistant", "content": turn["text"], "tool_calls": functions or None}
    choice = {"index": 0, "finish_reason": finish_reason(turn), "message": message}
    return {"id": "turn", "created": 0, "model": "policy", "object": "chat.completion", "choices": [choice]}


def finish_reason(turn: Turn) -> str:
    """Why a turn ended, in the terms of OpenAI's protocol."""
    return "length" if turn["is_cut"] else "tool_calls" if turn["calls"] else "stop"


class HostedEpisode(Protocol):
    """One episode. Every method may raise EpisodeFault."""

    @property
    def exchange(self) -> "TurnExchange":
        """Takes the turns after `begin`."""

    async def begin(self) -> list[PlainMessage]:
        """The messages that follow the prompt's own; TaskFault if the task has changed."""

    async def score(self) -> dict[str, Any]:
        """`reward`, and `metrics`: the value of every reward function and metric by its name."""


class HostedEnvironment(Protocol):
    """One loaded environment."""

    async def open(self) -> dict[str, Any]:
        """Make it ready, and describe it (`HostedDescription`); Unusable if it cannot be used."""

    async def tasks(self, split: str, start: int, stop: int) -> list[dict[str, Any]]:
        """Tasks of a split, each with `messages`, `answer`, `info`, `task` and `digest`."""

    def episode(self, split: str, row: int, digest: str) -> HostedEpisode:
        """An episode of a task; TaskFault if there is no such task, or it has changed."""

    async def teardown(self) -> None:
        """The environment's own teardown."""


class Channel:
    """JSON lines in and out; the environment's own output goes to standard error."""

    def __init__(self) -> None:
        self._requests = os.fdopen(os.dup(0), encoding="utf-8")
        self._replies: TextIO = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(2, 1)

    def receive(self) -> dict[str, Any] | None:
        """The next request; None when the other side has gone."""
        line = self._requests.readline()
        return json.loads(line) if line else None

    def send(self, number: int, **reply: Any) -> None:
        self._replies.write(json.dumps({"id": number, **reply}, default=str) + "\n")
        self._replies.flush()


async def serve(environment: HostedEnvironment, channel: Channel) -> None:
    """Answer requests until the other side goes."""
    loop, over = asyncio.get_running_loop(), asyncio.Event()
    episodes: dict[int, HostedEpisode] = {}
    tasks: dict[int, asyncio.Task[None]] = {}

    async def answer(request: dict[str, Any]) -> Any:
        match request["op"]:
            case "tasks":
                return await environment.tasks(request["split"], request["start"], request["stop"])
            case "reset":
                episode = environment.episode(request["split"], request["row"], request["digest"])
                episodes[request["episode"]] = episode
                return await episode.begin()
            case "respond":
                return await episodes[request["episode"]].exchange.respond(request)
            case "score":
                return await episodes[request["episode"]].score()
            case "close":
                found = episodes.pop(request["episode"], None)
                return await found.exchange.close() if found else None
        raise AssertionError(f"unknown request {request['op']}")

    async def reply(request: dict[str, Any]) -> None:
        try:
            channel.send(request["id"], ok=await answer(request))
        except TaskFault as error:
            channel.send(request["id"], task=str(error))
        except Exception as error:  # noqa: BLE001 - an environment may raise anything, which ends its own episode alone
            if not isinstance(error, EpisodeFault) or error.__cause__ is not None:
                traceback.print_exc()
            channel.send(request["id"], fault=str(error) if isinstance(error, EpisodeFault) else line_of(error))

    def take(request: dict[str, Any] | None) -> None:
        if request is None:
            over.set()
        elif request["op"] == "cancel":
            if request["target"] in tasks:
                tasks[request["target"]].cancel()
            channel.send(request["id"], ok=None)
        else:
            task = tasks[request["id"]] = loop.create_task(reply(request))
            task.add_done_callback(lambda _: tasks.pop(request["id"], None))

    def read() -> None:
        while (request := channel.receive()) is not None:
            loop.call_soon_threadsafe(take, request)
        threading.Timer(_QUIT_S, os._exit, [1]).start()  # in case the environment hangs
        loop.call_soon_threadsafe(take, None)

    threading.Thread(target=read, daemon=True).start()
    await over.wait()
    await environment.teardown()


class TurnExchange:
    """One rollout, to which the policy's turns are passed when it requests them."""

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
        self._rollout.cancel()
        await asyncio.gather(self._rollout, return_exceptions=True)

    @property
    def seen(self) -> list[PlainMessage]:
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

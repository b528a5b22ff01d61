"""Requests of the other side: JSON lines on standard input, answered on standard output."""

import asyncio
import json
import os
import threading
import traceback
from typing import Any, Protocol, TextIO

from luffy.hosted.foreign.faults import EpisodeFault, TaskFault, line_of
from luffy.hosted.foreign.plain_messages import PlainMessage, Turn

_QUIT_S = 10.0
"""Limit of the environment's own teardown."""


class HostedEpisode(Protocol):
    """One episode. Every method may raise EpisodeFault."""

    async def begin(self) -> list[PlainMessage]:
        """The messages that follow the prompt's own; TaskFault if the task has changed."""
        ...

    async def respond(self, turn: Turn) -> list[PlainMessage] | None:
        """The answer to a turn; None when the episode is over."""
        ...

    async def score(self) -> dict[str, Any]:
        """`reward`, and `metrics`: the value of every reward function and metric by its name."""
        ...

    async def close(self) -> None:
        """End the episode."""
        ...


class HostedEnvironment(Protocol):
    """One loaded environment."""

    async def open(self) -> dict[str, Any]:
        """Make it ready, and describe it (`HostedDescription`); Unusable if it cannot be used."""
        ...

    async def tasks(self, split: str, start: int, stop: int) -> list[dict[str, Any]]:
        """Tasks of a split, each with `messages`, `answer`, `info`, `task` and `digest`."""
        ...

    def episode(self, split: str, row: int, digest: str) -> HostedEpisode:
        """An episode of a task; TaskFault if there is no such task, or it has changed."""
        ...

    async def teardown(self) -> None:
        """The environment's own teardown."""
        ...


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
        """Send a reply."""
        self._replies.write(json.dumps({"id": number, **reply}, default=str) + "\n")
        self._replies.flush()


class _Host:
    """The episodes of an environment by their numbers."""

    def __init__(self, environment: HostedEnvironment) -> None:
        self._environment = environment
        self._episodes: dict[int, HostedEpisode] = {}

    async def answer(self, op: str, request: dict[str, Any]) -> Any:
        """The reply to a request; EpisodeFault, TaskFault and whatever an environment raises are passed on."""
        match op:
            case "tasks":
                return await self._environment.tasks(request["split"], request["start"], request["stop"])
            case "reset":
                episode = self._environment.episode(request["split"], request["row"], request["digest"])
                self._episodes[request["episode"]] = episode
                return await episode.begin()
            case "respond":
                return await self._episodes[request["episode"]].respond(request)
            case "score":
                return await self._episodes[request["episode"]].score()
            case "close":
                found = self._episodes.pop(request["episode"], None)
                return await found.close() if found else None
        raise AssertionError(f"unknown request {op}")


async def serve(environment: HostedEnvironment, channel: Channel) -> None:
    """Answer requests until the other side goes."""
    host = _Host(environment)
    loop, over = asyncio.get_running_loop(), asyncio.Event()
    tasks: dict[int, asyncio.Task[None]] = {}

    def take(request: dict[str, Any] | None) -> None:
        if request is None:
            over.set()
        elif request["op"] == "cancel":
            if request["target"] in tasks:
                tasks[request["target"]].cancel()
            channel.send(request["id"], ok=None)
        else:
            task = tasks[request["id"]] = loop.create_task(_answered(host, channel, request))
            task.add_done_callback(lambda _: tasks.pop(request["id"], None))

    def read() -> None:
        while (request := channel.receive()) is not None:
            loop.call_soon_threadsafe(take, request)
        threading.Timer(_QUIT_S, os._exit, [1]).start()  # in case the environment hangs
        loop.call_soon_threadsafe(take, None)

    threading.Thread(target=read, daemon=True).start()
    await over.wait()
    await environment.teardown()


async def _answered(host: _Host, channel: Channel, request: dict[str, Any]) -> None:
    try:
        channel.send(request["id"], ok=await host.answer(request["op"], request))
    except TaskFault as error:
        channel.send(request["id"], task=str(error))
    except Exception as error:  # noqa: BLE001 - an environment may raise anything, which ends its own episode alone
        if not isinstance(error, EpisodeFault) or error.__cause__ is not None:
            traceback.print_exc()
        channel.send(request["id"], fault=str(error) if isinstance(error, EpisodeFault) else line_of(error))

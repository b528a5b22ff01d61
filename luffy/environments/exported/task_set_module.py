"""Problems of luffy with their environment and graders, as a task set of the package verifiers (0.4.0).

Written by `luffy export-environment`, and needs nothing but verifiers. Environment and graders run in a process of the
interpreter that has luffy: `LUFFY_PYTHON`, else the one that wrote this. It starts with the first episode and ends with
this process, however that ends.
"""

import asyncio
import contextlib
import itertools
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import verifiers.v1 as vf

HERE = Path(__file__).resolve().parent
EXPORT = json.loads((HERE / "export.json").read_text(encoding="utf-8"))
_START_S = 300.0
_LONGEST_LINE = 1 << 26


class ProblemData(vf.TaskData):
    """A problem, and its place among the exported ones."""

    answer: str
    split: str
    row: int
    data_source: str


class ProblemTask(vf.Task[ProblemData]):
    """A problem; the environment scores it."""


class LuffyTasksetConfig(vf.TasksetConfig):
    """Which problems."""

    split: str = EXPORT["splits"][0]


class LuffyTaskset(vf.Taskset[ProblemTask, LuffyTasksetConfig]):
    """The exported problems of a split."""

    def load(self) -> Iterator[ProblemTask]:
        """Yield the problems in order; ValueError for a split that there is not."""
        split = self.config.split
        if split not in EXPORT["splits"]:
            raise ValueError(f"taskset.split: {split!r} is not one of {', '.join(EXPORT['splits'])}")
        with (HERE / f"{split}.jsonl").open(encoding="utf-8") as lines:
            for row, line in enumerate(lines):
                yield ProblemTask(_data(split, row, json.loads(line)), self.config.task)


def _data(split: str, row: int, problem: dict[str, Any]) -> ProblemData:
    system, messages = None, problem["messages"]
    if messages[0]["role"] == "system":
        system, messages = messages[0]["content"], messages[1:]
    return ProblemData(
        name=problem["uid"],
        prompt=messages,
        system_prompt=system,
        answer=problem["answer"],
        split=split,
        row=row,
        data_source=problem["data_source"],
    )


class LuffyConfig(vf.EnvConfig):
    """The agent that plays."""

    policy: vf.AgentConfig = vf.AgentConfig()


class LuffyEnv(vf.Env[LuffyConfig]):
    """An episode: the policy and luffy's environment in turns, scored by luffy."""

    def __init__(self, config: LuffyConfig) -> None:
        super().__init__(config)
        self._service: Service | None = None
        self._starting = asyncio.Lock()
        self._numbers = itertools.count()

    async def run(self, task: ProblemTask, agents: vf.Agents) -> None:
        """Play one episode; what fails in the environment fails the episode."""
        service = await self._started()
        number, data = next(self._numbers), task.data
        try:
            opening = await service.call("reset", episode=number, split=data.split, row=data.row, digest="")
            if opening:  # the environment speaks before the policy: prompt and opening are one turn
                first, task = [*data.prompt, *opening], task.with_data(prompt=None)
            else:
                first = None
            async with agents.policy.interaction(task) as interaction:
                await _play(service, number, interaction, first)
            if not interaction.trace.errors:
                scores = await service.call("score", episode=number)
                interaction.trace.record_reward("reward", scores["reward"])
                interaction.trace.record_metrics(scores["metrics"])
        finally:
            await service.call("close", episode=number)

    async def stop(self) -> None:
        """End luffy's process."""
        if self._service is not None:
            await self._service.close()
            self._service = None

    async def _started(self) -> "Service":
        async with self._starting:
            if self._service is None:
                self._service = await Service.start()
            return self._service


async def _play(service: "Service", number: int, interaction: vf.Interaction, first: list[dict] | None) -> None:
    """Turns until the environment, or a limit of verifiers, ends the episode."""
    segment = await interaction.turn(first)
    while not segment.terminated:
        written, is_cut = _newest_turn(interaction.trace)
        request = {"episode": number, "text": written, "calls": [], "is_cut": is_cut}
        messages = await service.call("respond", **request)
        if messages is None:
            return
        segment = await interaction.turn(messages)


def _newest_turn(trace: vf.Trace) -> tuple[str, bool]:
    """The policy's newest turn with its reasoning in front, and whether it was cut."""
    message, call = trace.assistant_messages[-1], trace.calls[-1]
    text, is_cut = message.content or "", call.finish_reason == "length"
    if not message.reasoning_content:
        return text, is_cut
    is_closed = bool(text) or not is_cut
    return f"<think>\n{message.reasoning_content}" + (f"\n</think>\n\n{text}" if is_closed else ""), is_cut


class Service:
    """Luffy's process, spoken to in lines of JSON."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None and process.stdout is not None
        self._process, self._requests, self._replies = process, process.stdin, process.stdout
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._lost = ""
        self._reader = asyncio.create_task(self._read())

    @classmethod
    async def start(cls) -> "Service":
        """Start the process and wait until it is ready; RuntimeError where it cannot be used."""
        python = os.environ.get("LUFFY_PYTHON", EXPORT["python"])
        if not Path(python).is_file():
            raise RuntimeError(f"{python}: no such file; set LUFFY_PYTHON to the Python interpreter that has luffy")
        process = await asyncio.create_subprocess_exec(
            python,
            "-m",
            "luffy.environments.exported.environment_service",
            str(HERE),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            cwd=EXPORT["directory"] if Path(EXPORT["directory"]).is_dir() else None,
            limit=_LONGEST_LINE,
        )
        service = cls(process)
        try:
            await asyncio.wait_for(service.call("load"), _START_S)
        except BaseException:
            await service.close()
            raise
        return service

    async def call(self, op: str, **request: Any) -> Any:
        """The reply to a request; RuntimeError with one line where there is none."""
        if self._lost:
            raise RuntimeError(self._lost)
        number = next(self._numbers)
        reply = self._waiting[number] = asyncio.get_running_loop().create_future()
        self._send(number, op, request)
        try:
            return await reply
        except asyncio.CancelledError:
            self._send(next(self._numbers), "cancel", {"target": number})
            raise

    async def close(self) -> None:
        """End the process."""
        self._requests.close()
        await self._process.wait()
        await self._reader

    def _send(self, number: int, op: str, request: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # it has died: the reader says so
            self._requests.write(json.dumps({"id": number, "op": op, **request}).encode() + b"\n")

    async def _read(self) -> None:
        async for line in self._replies:
            reply = json.loads(line)
            waiting = self._waiting.pop(reply["id"], None)
            if waiting is None or waiting.done():
                continue
            if "ok" in reply:
                waiting.set_result(reply["ok"])
            else:
                words = next(reply[kind] for kind in ("fault", "task", "refused") if kind in reply)
                waiting.set_exception(RuntimeError(words))
        self._lost = "luffy's process has ended; its last words are on standard error"
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(RuntimeError(self._lost))


__all__ = ["LuffyEnv", "LuffyTaskset"]

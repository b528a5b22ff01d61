"""The guessing game in a process that is killed once, in the middle of an episode, of a tool call and of its code."""

import asyncio
import os
import signal
from collections.abc import Sequence
from pathlib import Path

import psutil

from luffy.config.sandbox import SandboxConfig
from luffy.environments.guess_number import GuessingGame
from luffy.environments.tools import ToolRunner
from luffy.sandbox import SandboxOfLoop
from luffy.types import Message


class DyingGame(GuessingGame):
    """With `TEST_DIE_AT` (a file with a number of answers left), the answer after them is a SIGKILL.

    Answers count once RL has journalled a step. Before the kill, code in a sandbox begins to run, called by a tool, and
    the file `<TEST_DIE_AT>.children` is left with the processes that this one has started.
    """

    async def respond(self, conversation: Sequence[Message]) -> Sequence[Message] | None:
        if (name := os.environ.get("TEST_DIE_AT")) is not None and (file := Path(name)).exists() and _has_journal():
            left = int(file.read_text())
            if left == 0:
                file.unlink()
                await _call_a_tool()
                children = psutil.Process().children(recursive=True)
                Path(f"{name}.children").write_text(" ".join(str(child.pid) for child in children))
                os.kill(os.getpid(), signal.SIGKILL)
            file.write_text(str(left - 1))
        return await super().respond(conversation)


def _has_journal() -> bool:
    return any(Path(os.environ["LUFFY_WORKSPACE"]).glob("stages/rl/*/journal/step_000001.parquet"))


async def _call_a_tool() -> None:
    """Start a call of a tool whose code runs for ever in a sandbox; returns once it does."""
    running = asyncio.Event()
    # Kept by the loop alone, which ends with the process.
    asyncio.get_running_loop().create_task(
        ToolRunner().run("endless", _endless, {"running": running}, is_async=True, timeout_s=None)
    )
    await running.wait()


async def _endless(running: asyncio.Event) -> None:
    session = await SandboxOfLoop(SandboxConfig()).open_session()
    await session.run("import time")
    endless = asyncio.ensure_future(session.run("while True: pass"))
    await asyncio.sleep(0.1)  # until the code has been sent
    running.set()
    await endless

"""The tool `python` in a real sandbox, in several event loops one after another."""

import asyncio

from luffy.config.environment import SandboxConfig, ToolsEnvironment
from luffy.environments.call_formats import HermesCalls, ToolCall
from luffy.environments.registry import instructions_of, open_environment
from luffy.grading import Problem
from luffy.types import Message

UNCONFINED = SandboxConfig(kind="unsafe_local", unsafe_local=True)
"""The tests' own code is trusted, and `bwrap` is not installed everywhere."""


def turn(code):
    return Message("assistant", HermesCalls().render([ToolCall("python", {"code": code})]))


async def answers(make, *codes):
    environment = make()
    await environment.reset(Problem())
    messages = [await environment.respond([turn(code)]) for code in codes]
    await environment.close()
    return [message.content.split("\n")[1:-1] for (message,) in messages]


def test_episodes_have_interpreters_of_their_own_in_every_event_loop():
    config = ToolsEnvironment(kind="tools", tools=("python",), sandbox=UNCONFINED, timeout_s=0.001)
    make = open_environment(config)
    assert '"name": "python"' in instructions_of(config)

    async def both():
        return await asyncio.gather(answers(make, "x = 6", "x * 7"), answers(make, "'x' in globals()"))

    for _ in range(2):
        assert asyncio.run(both()) == [[[""], ["42"]], [["False"]]]

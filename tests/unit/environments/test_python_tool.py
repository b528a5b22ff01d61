"""The tool `python`: a session an episode, opened late, closed with it, replaced after its end; also in a sandbox."""

import asyncio
import contextlib
import io
from dataclasses import dataclass, replace

import pytest

from luffy.config.environment import SandboxConfig, ToolsEnvironment
from luffy.environments.call_formats import HermesCalls, ToolCall
from luffy.environments.registry import instructions_of, open_environment
from luffy.environments.tool_functions import tool_of
from luffy.environments.tools import ToolEpisode, ToolRunner, python_tool
from luffy.errors import LuffyError
from luffy.grading.request import Problem
from luffy.sandbox import ExecutionStatus
from luffy.types import Message

CONFIG = ToolsEnvironment(kind="tools", tools=("calculator",), timeout_s=0.001)


@dataclass(frozen=True)
class Result:
    output: str
    status: ExecutionStatus = ExecutionStatus.OK
    wall_s: float = 0.0
    session_is_over: bool = False


class TrustedSession:
    """Runs the test's own code here, with the interface of a sandbox's session."""

    def __init__(self):
        self.names = {}
        self.is_closed = False

    async def run(self, code):
        await asyncio.sleep(0.01)  # longer than the limit of other tools
        printed = io.StringIO()
        try:
            with contextlib.redirect_stdout(printed):
                exec(code, self.names)
        except SystemExit:
            return Result(printed.getvalue() + "[ended]\n", ExecutionStatus.KILLED, session_is_over=True)
        except Exception as error:
            return Result(f"{printed.getvalue()}{type(error).__name__}: {error}\n", ExecutionStatus.RAISED)
        return Result(printed.getvalue())

    async def close(self):
        self.is_closed = True


def play(*codes, sessions=None):
    """The answers to code, and the environment's counts."""
    opened = [] if sessions is None else sessions

    async def open_session():
        opened.append(TrustedSession())
        return opened[-1]

    async def episode():
        tool = replace(tool_of(python_tool(open_session)), limits_itself=True)
        environment = ToolEpisode(CONFIG, {tool.name: tool}, ToolRunner())
        await environment.reset(Problem())
        answers = []
        for code in codes:
            turn = HermesCalls().render([ToolCall("python", {"code": code})])
            (message,) = await environment.respond([Message("assistant", turn)])
            answers.append(message.content.removeprefix("<tool_response>\n").removesuffix("\n</tool_response>"))
        await environment.close()
        return answers, environment.counts()

    return asyncio.run(episode())


def test_names_are_kept_from_call_to_call_and_the_session_is_closed():
    sessions = []
    answers, counts = play("x = 6", "print(x * 7)", sessions=sessions)
    assert answers == ["", "42"]
    assert [session.is_closed for session in sessions] == [True]
    assert counts["tool_calls"] == 2 and counts["tool_errors"] == 0


def test_a_traceback_is_shown_as_it_is_and_counted():
    answers, counts = play("print('a'); 1 / 0", "print('b')")
    assert answers == ["a\nZeroDivisionError: division by zero", "b"]
    assert counts["tool_errors/raised"] == 1


def test_an_interpreter_that_has_ended_is_replaced():
    sessions = []
    answers, _ = play("x = 1", "raise SystemExit", "print('x' in globals())", sessions=sessions)
    assert answers[1:] == ["[ended]", "False"]
    assert [session.is_closed for session in sessions] == [True, True]


def test_no_session_is_opened_without_a_call():
    sessions = []
    play(sessions=sessions)
    assert sessions == []


def test_a_sandbox_that_does_not_start_is_a_fault_of_the_environment():
    async def fails():
        raise LuffyError("no sandbox here")

    async def respond():
        tool = tool_of(python_tool(fails))
        turn = HermesCalls().render([ToolCall("python", {"code": "1"})])
        await ToolEpisode(CONFIG, {"python": tool}, ToolRunner()).respond([Message("assistant", turn)])

    with pytest.raises(LuffyError, match="no sandbox here"):
        asyncio.run(respond())


def test_the_policy_sees_code_as_the_one_parameter():
    schema = tool_of(python_tool(TrustedSession)).schema["function"]
    assert schema["name"] == "python" and list(schema["parameters"]["properties"]) == ["code"]


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

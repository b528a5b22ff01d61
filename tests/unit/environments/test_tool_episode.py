"""Episodes with tools: what the policy is told, what is counted, what is freed at the end."""

import asyncio
import json
import re
import threading
from dataclasses import replace

import pytest
from support.patience import PATIENCE_S, wait_until
from support.sandboxed import require_bubblewrap
from support.stages import CONFIGS
from synthetic import sample_tools

from luffy.config import load_experiment
from luffy.config.data import ArithmeticSource, GuessNumberSource
from luffy.config.environment import ToolsEnvironment
from luffy.data.sources import open_source
from luffy.environments.limits import MOST_HANGING
from luffy.environments.registry import instructions_of, open_environment
from luffy.environments.tool_functions import tool_of
from luffy.environments.tools import ToolEpisode, ToolRunner, python_tool
from luffy.errors import LuffyError
from luffy.grading.request import Problem, problem_of
from luffy.sandbox import ExecutionResult, ExecutionStatus
from luffy.types import Message

PROBLEM = Problem(data_source="cities")


@pytest.fixture(autouse=True)
def released():
    """Ends the calls of `hang` after the test."""
    sample_tools.RELEASED.clear()
    sample_tools.CLOSED.clear()
    yield
    sample_tools.RELEASED.set()
    wait_until(lambda: not hanging_threads())


def hanging_threads():
    return [thread for thread in threading.enumerate() if thread.name == "limited call"]


def opened(*names, timeout_s=PATIENCE_S):
    paths = tuple(name if name == "calculator" else f"synthetic.sample_tools:{name}" for name in names)
    return open_environment(ToolsEnvironment(kind="tools", tools=paths, timeout_s=timeout_s))


async def turns(environment, *contents):
    """Play an episode; the answers' texts, None where it is over."""
    await environment.reset(PROBLEM)
    answers = []
    for content in contents:
        messages = await environment.respond([Message("user", "Go."), Message("assistant", content)])
        answers.append(None if messages is None else "\n".join(message.content for message in messages))
    await environment.close()
    return answers


def play(make, *contents):
    environment = make()
    answers = asyncio.run(turns(environment, *contents))
    return answers, {name: count for name, count in environment.counts().items() if count}


def call(name, **arguments):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def result(*texts):
    return "\n".join(f"<tool_response>\n{text}\n</tool_response>" for text in texts)


REMEMBER = call("remember", text="a")
IN_ORDER = REMEMBER + call("slow_echo", text="b", seconds=0.01) + call("remember", text="c")
LATE = {"tool_errors": 1, "tool_errors/timed_out": 1}
NOT_RUN = {"tool_calls": 19, "tool_errors": 3, "tool_errors/not_run": 3}
LONG = "a" * 4096 + "m" * 16 + "z" * 4096


@pytest.mark.parametrize(
    ("turn", "answer", "counts"),
    [
        (call("calculator", expression="6*7"), ["42"], {}),
        # Calls of a turn run in order and are answered in one message.
        (IN_ORDER, ["1", "b", "2"], {}),
        # Text is shown as it is, and other results as JSON.
        (call("echo", text="ä"), ["ä"], {}),
        (call("structure", size=1), ['{"größe": 1, "list": [null, true]}'], {}),
        (call("nothing"), ["null"], {}),
        (call("decorated", number=2), ["4"], {}),
        (call("thread_name"), ["limited call"], {}),
        # A call past its limit is given up.
        *((call(name), [f"Error: {name} did not end within 0.02 s"], LATE) for name in ("hang", "stubborn")),
        # Too many calls in a turn are not run.
        (REMEMBER * 19, [*map(str, range(1, 17)), "Error: 3 more calls were not run; a turn may have 16"], NOT_RUN),
        # A long result is cut in the middle and says so.
        (call("echo", text=LONG), [LONG.replace("m" * 16, "\n... [16 characters left out] ...\n")],
         {"tool_results_cut": 1}),
    ],
)  # fmt: skip
def test_calls_are_answered_and_counted(turn, answer, counts):
    names = re.findall(r'"name": "(\w+)"', turn)
    made = opened(*dict.fromkeys(names), **({"timeout_s": 0.02} if counts is LATE else {}))
    by_name = {f"tool_calls/{name}": min(names.count(name), 16) for name in names}
    # A turn without a call ends the episode.
    assert play(made, turn, "42.") == ([result(*answer), None], {"tool_calls": len(names), **by_name, **counts})


@pytest.mark.parametrize(
    ("turn", "kind", "words"),
    [
        (call("search", query="a"), "unknown_tool", "there is no tool 'search'; there are: echo, refuse"),
        (call("s" * 500), "unknown_tool", "there are: echo"),
        ("<tool_call>{</tool_call>", "broken_call", "this call cannot be read: it is not JSON"),
        (call("echo"), "wrong_arguments", "echo: missing argument `text` (it takes text)"),
        (call("echo", text=1), "wrong_arguments", "`text`: Input should be a valid string"),
        (call("echo", text="a", state=1), "wrong_arguments", "unknown argument `state`"),
        (call("nothing", a=1), "wrong_arguments", "it takes no arguments"),
        (call("refuse"), "raised", "LookupError: why"),
        (call("refuse_at_length"), "raised", "LookupError: xxx"),
        (call("refuse_later"), "raised", "LookupError: later"),
        (call("leave"), "raised", "SystemExit: 3"),
        (call("cancel_itself"), "raised", "CancelledError"),
        (call("explain"), "raised", "Traceback: all of it"),
    ],
)
def test_a_failed_call_is_told_to_the_policy_and_counted_by_its_kind(turn, kind, words):
    raising = ("refuse", "refuse_at_length", "refuse_later", "leave", "cancel_itself", "explain")
    made = opened("echo", *raising, "nothing")
    answers, counts = play(made, turn, call("echo", text="again"))
    assert ("Error: " in answers[0]) != ("explain" in turn)
    assert words in answers[0] and len(answers[0]) < 700
    assert answers[1] == result("again")
    assert counts["tool_calls"] == 2 and counts["tool_errors"] == counts[f"tool_errors/{kind}"] == 1


def test_a_fault_of_a_tool_or_of_what_it_depends_on_is_no_answer_to_the_policy():
    for name, fault in {
        "lose_service": "the service is gone",
        "fail_for_good": "the service refuses",
        "half_asynchronous": "half_asynchronous returns an awaitable, so it has to be defined with `async",
    }.items():
        with pytest.raises(LuffyError, match=fault):
            play(opened(name), call(name))

    async def no_sandbox():
        raise LuffyError("no sandbox here")

    with pytest.raises(LuffyError, match="no sandbox here"):
        play(python(no_sandbox), call("python", code="1"))


def test_a_slow_tool_does_not_hold_up_other_episodes():
    made = opened("hang", "echo")

    async def both():
        waiting = asyncio.create_task(turns(made(), call("hang")))
        others = [await turns(made(), call("echo", text="a")) for _ in range(3)]
        assert not waiting.done()
        sample_tools.RELEASED.set()
        return others, await waiting

    assert asyncio.run(both()) == ([[result("a")]] * 3, [result("released")])


def test_calls_that_never_end_do_not_pile_up_nor_keep_the_process():
    made, hangs = opened("hang", timeout_s=0.05), call("hang")

    async def flood():
        return await asyncio.gather(*(turns(made(), hangs) for _ in range(MOST_HANGING)))

    asyncio.run(flood())
    assert len(hanging_threads()) == MOST_HANGING
    assert all(thread.daemon for thread in hanging_threads())
    with pytest.raises(LuffyError, match=rf"run past environment\.timeout_s: hang \({MOST_HANGING}\)"):
        play(made, call("hang"))
    sample_tools.RELEASED.set()
    wait_until(lambda: not hanging_threads())
    assert play(made, call("hang"))[0] == [result("released")]


def test_a_cancelled_episode_is_closed_and_its_call_given_up():
    made = opened("remember", "hang")

    async def cancelled():
        environment = made()
        await environment.reset(PROBLEM)
        await environment.respond([Message("assistant", REMEMBER)])
        waiting = asyncio.create_task(environment.respond([Message("assistant", call("hang"))]))
        await asyncio.sleep(0.05)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await environment.close()

    asyncio.run(cancelled())
    assert sample_tools.CLOSED == ["cities"]


def test_each_episode_has_its_own_state_and_what_tools_opened_is_closed_in_reverse_at_its_end(caplog):
    made = opened("remember", "calculator")
    assert play(made, *[REMEMBER] * 3)[0] == [result("1"), result("2"), result("3")]
    assert play(made, REMEMBER)[0] == [result("1")]
    names = {"tool_calls", "tool_errors", "tool_calls/remember", "tool_calls/calculator", "tool_errors/timed_out"}
    assert names <= set(made().counts())
    sample_tools.CLOSED.clear()
    play(opened("open_things"), call("open_things"))
    assert sample_tools.CLOSED == ["asynchronous", "first"]
    assert "OSError: cannot be closed" in caplog.text
    environment = opened("remember")()
    asyncio.run(turns(environment))
    with pytest.raises(RuntimeError, match="the episode has ended"):
        environment._state.on_close(print)


class ScriptedSession:
    """Answers with the code and the number of its call; the codes `raise` and `exit` end so."""

    def __init__(self):
        self.num_calls, self.is_closed = 0, False

    async def run(self, code):
        await asyncio.sleep(0.01)  # longer than the limit of other tools
        self.num_calls += 1
        status = {"raise": ExecutionStatus.RAISED, "exit": ExecutionStatus.KILLED}.get(code, ExecutionStatus.OK)
        return ExecutionResult(f"{code} {self.num_calls}\n", status, session_is_over=code == "exit", wall_s=0.01)

    async def close(self):
        self.is_closed = True


def python(open_session):
    """Makes episodes whose only tool runs code in such sessions."""
    config = ToolsEnvironment(kind="tools", tools=("calculator",), timeout_s=0.001)
    tool = replace(tool_of(python_tool(open_session)), limits_itself=True)
    return lambda: ToolEpisode(config, {"python": tool}, ToolRunner())


def test_code_runs_in_a_session_that_is_opened_late_and_closed_with_the_episode():
    async def open_session():
        sessions.append(ScriptedSession())
        return sessions[-1]

    for (*codes,), outputs, num_sessions, raised in (
        (("a", "b"), ("a 1", "b 2"), 1, 0),
        (("raise", "b"), ("raise 1", "b 2"), 1, 1),
        (("a", "exit", "b"), ("a 1", "exit 2", "b 1"), 2, 1),  # one that has ended is replaced
        ((), (), 0, 0),
    ):
        sessions = []
        answers, counts = play(python(open_session), *(call("python", code=code) for code in codes))
        assert answers == list(map(result, outputs)), codes
        assert [session.is_closed for session in sessions] == [True] * num_sessions, codes
        assert (counts.get("tool_calls", 0), counts.get("tool_errors/raised", 0)) == (len(codes), raised), codes


def test_episodes_have_interpreters_of_their_own_in_every_event_loop():
    require_bubblewrap()
    config = ToolsEnvironment(kind="tools", tools=("python",), timeout_s=0.001)
    schema = tool_of(python_tool(ScriptedSession)).schema["function"]
    assert schema["name"] == "python" and list(schema["parameters"]["properties"]) == ["code"]
    assert '"name": "python"' in instructions_of(config)
    make = open_environment(config)
    stores, asks = [call("python", code="x = 6"), call("python", code="x * 7")], call("python", code="'x' in globals()")

    async def both():
        return await asyncio.gather(turns(make(), *stores), turns(make(), asks))

    for _ in range(2):
        assert asyncio.run(both()) == [[result(""), result("42")], [result("False")]]


def games(**settings):
    return list(open_source(GuessNumberSource(kind="guess_number", num_prompts=60, **settings), "train", 3).rows())


def assert_answers_as_recorded(experiment, prompts):
    """The experiment's environment answers every turn of the demonstrations with the recorded messages."""
    make = open_environment(load_experiment(CONFIGS / experiment).environment)

    async def play(prompt, trace):
        environment = make()
        await environment.reset(problem_of(prompt))
        for place, turn in enumerate(trace.turns):
            if turn.role == "assistant":
                answers = await environment.respond([*prompt.messages, *trace.turns[: place + 1]])
                recorded = trace.turns[place + 1 :]
                assert recorded[: len(answers or ())] == tuple(answers or ())
                assert [turn.role for turn in recorded[len(answers or ()) :]][:1] in (["assistant"], [])

    for prompt in prompts:
        for trace in prompt.traces:
            asyncio.run(play(prompt, trace))


def test_calculator_and_game_answer_what_teacher_and_player_recorded():
    operations = {"add": 1.0, "reverse": 1.0, "multiply": 2.0}
    settings = {"num_prompts": 60, "num_operations": (1, 3), "operations": operations, "by_calculator": ("multiply",)}
    source = ArithmeticSource(kind="arithmetic", **settings)
    prompts = [prompt for prompt in open_source(source, "train", 3).rows() if prompt.traces[0].turns]
    assert len(prompts) > 30
    assert_answers_as_recorded("tools.yaml", prompts)
    for prompt in prompts:
        assert prompt.traces[0].reply.endswith(rf"\boxed{{{prompt.ground_truth}}}")
        num_products = prompt.messages[0].content.count("*")
        assert sum("<tool_call>" in turn.content for turn in prompt.traces[0].turns) == num_products > 0
    # The game: its player finds every number in six guesses.
    assert_answers_as_recorded("guess_number.yaml", games())
    assert all(prompt.traces[0].reply == prompt.ground_truth for prompt in games())
    for player, share in (("bisecting", 1.0), ("random", 0.4)):
        found = [prompt.traces[0].reply == prompt.ground_truth for prompt in games(player=player, max_turns=6)]
        assert all(found) if share == 1.0 else sum(found) < share * len(found)

"""Environments of verifiers are played and scored here as by verifiers itself.

`LUFFY_TEST_TASK_SETS` names an interpreter with verifiers 0.4.0 (task sets), with `uv` beside it for the comparisons
with verifiers' own evaluation, and textarena. `LUFFY_TEST_VERIFIERS` names one with verifiers, reasoning-gym and
textarena for published environments, whose modules, from the folder `environments/` of verifiers' own repository, are
on `PYTHONPATH`.
"""

import asyncio
import json
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from support.nltk_words import WORDS, write_words
from support.patience import ran, wait_until_ended
from support.refusals import refused

from luffy.config.data import VerifiersPackage, VerifiersSource
from luffy.config.environment import VerifiersEnvironment
from luffy.data.sources import open_source
from luffy.environments.registry import instructions_of, open_environment
from luffy.errors import ConfigError, DataError
from luffy.grading.request import problem_of
from luffy.hosted.verifiers_process import HostedFault, VerifiersProcess
from luffy.types import Message, Prompt

TASK_SETS = os.environ.get("LUFFY_TEST_TASK_SETS")
PUBLISHED = os.environ.get("LUFFY_TEST_VERIFIERS")
needs_task_sets = pytest.mark.skipif(
    TASK_SETS is None, reason="needs verifiers 0.4.0: name its interpreter in LUFFY_TEST_TASK_SETS"
)
needs_uv = pytest.mark.skipif(
    TASK_SETS is None or not Path(TASK_SETS).with_name("uv").exists(),
    reason="needs uv beside the interpreter that LUFFY_TEST_TASK_SETS names",
)
needs_published = pytest.mark.skipif(
    PUBLISHED is None, reason="needs verifiers: name its interpreter in LUFFY_TEST_VERIFIERS"
)
pytestmark = pytest.mark.slow
SYNTHETIC = Path(__file__).parents[1] / "synthetic"
SUMS = {"eval": {"taskset": {"split": "test"}, "select": {"limit": 2}}}
Score = dict[str, float]


def own_evaluation(python: str, program: str, **asked: object) -> list[Score]:
    """What verifiers itself finds for each of the cases, by a program that its interpreter runs."""
    environment = {"PYTHONHASHSEED": "0", **os.environ, "PATH": f"{Path(python).parent}:{os.environ['PATH']}"}
    result = ran([python, SYNTHETIC / program], input=json.dumps(asked) + "\n", env=environment)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


# Task sets


@pytest.fixture(scope="module")
def modules():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(SYNTHETIC / "task_sets"), prepend=os.pathsep)
        yield


@pytest.fixture(scope="module")
def opened(modules):
    """Starts a process for each environment and arguments once."""
    if TASK_SETS is None:
        pytest.skip("needs verifiers 0.4.0: name its interpreter in LUFFY_TEST_TASK_SETS")
    processes = {}

    def start(environment: str, **arguments: object) -> VerifiersProcess:
        key = environment + json.dumps(arguments)
        if key not in processes:
            package = VerifiersPackage(environment=environment, arguments=arguments, python=TASK_SETS)
            processes[key] = VerifiersProcess(package)
        return processes[key]

    yield start
    for process in processes.values():
        process.close()
        assert not psutil.pid_exists(process.pid)


def begin(process: VerifiersProcess, row: int = 0, split: str = "train"):
    """The task's messages, and an episode of it."""
    (task,) = process.call("tasks", split=split, start=row, stop=row + 1)
    episode = process.new_episode()
    assert process.call("reset", episode=episode, split=split, row=row, digest=task["digest"]) == []
    return [message["content"] for message in task["messages"]], episode


def respond(process: VerifiersProcess, episode: int, text: str, *calls: dict[str, str], is_cut: bool = False):
    answer = process.call("respond", episode=episode, text=text, calls=calls, is_cut=is_cut)
    return answer and [(message["role"], message["content"]) for message in answer]


def look(name: str) -> dict[str, str]:
    return {"name": "facts_lookup", "arguments": json.dumps({"name": name})}


def test_tasks_have_prompt_answer_and_the_rest_of_their_data(opened):
    process = opened("sums", **SUMS)
    assert process.description.tasks == {"train": 3, "eval": 2}
    assert set(process.description.functions) == {"correct", "by_runtime", "characters"}
    first, _ = process.call("tasks", split="train", start=0, stop=2)
    assert [message["content"] for message in first["messages"]] == ["Add.", "1 + 1 ="]
    assert (first["answer"], first["info"]) == ("2", {"level": 1})
    assert process.call("tasks", split="eval", start=1, stop=2)[0]["info"] == {"level": 51}


def test_an_episode_is_scored_with_a_runtime_and_without_an_answer_and_one_that_is_closed_is_not_missed(opened):
    process = opened("sums", **SUMS)
    _, episode = begin(process, 1)
    assert respond(process, episode, "3") is None
    scores = {"correct": 1.0, "by_runtime": 1.0, "characters": 1.0}
    assert process.call("score", episode=episode) == {"reward": 3.0, "metrics": scores}
    _, episode = begin(process)
    assert process.call("score", episode=episode)["reward"] == 1.0
    _, closed = begin(process)
    process.call("close", episode=closed)
    _, cut = begin(process)
    assert respond(process, cut, "2", is_cut=True) is None
    assert process.call("score", episode=cut)["reward"] == 3.0


LATE = {"taskset": {"task": {"fault": "late"}}, "agent": {"timeout": {"scoring": 1}}}


@pytest.mark.parametrize(
    ("environment", "arguments", "words"),
    [
        ("sums", {"taskset": {"task": {"fault": "raises"}}}, "scoring: ValueError: no such number"),
        ("sums", {"taskset": {"task": {"fault": "not_finite"}}}, "correct returned nan"),
        ("sums", LATE, "by_runtime was not computed in time"),
        ("opened_game", {"misbehaves": "plays_twice"}, "rewrites earlier messages or begins another conversation"),
        ("opened_game", {"misbehaves": "answers_for_the_policy"}, "writes turns of the policy"),
    ],
)
def test_a_missing_score_and_what_no_policy_can_answer_end_the_episode(opened, environment, arguments, words):
    process = opened(environment, **arguments)
    _, episode = begin(process)
    with pytest.raises(HostedFault, match=words):
        respond(process, episode, "2")


@needs_task_sets
@pytest.mark.parametrize(
    ("environment", "arguments", "named"),
    [
        ("sums", {"taskset": {"endless": True}}, ["SumsTaskset", "arguments.select"]),
        ("sums", {"eval": {"tasks": 3}}, ["arguments.eval", "tasks", "taskset", "select"]),
        ("sums", {"taskset": "test"}, ["arguments.taskset", "test"]),
        ("sums", {"taskset": {"splits": "x"}}, ["taskset.splits"]),
        ("two_agents", {}, ["2 agents", "proposer", "solver"]),
        ("nowhere", {}, ["nowhere"]),
    ],
)
def test_what_cannot_be_used_is_refused_in_one_line(modules, environment, arguments, named):
    package = VerifiersPackage(environment=environment, arguments=arguments, python=TASK_SETS)
    with refused(*named, error=ConfigError):
        VerifiersProcess(package)


def test_an_environment_may_open_the_conversation_and_a_stop_condition_ends_it_before_the_policy_is_asked(opened):
    process = opened("opened_game")
    messages, episode = begin(process, 1)
    assert messages == ["Which number? Try 6 or more."]
    assert respond(process, episode, "6") == [("user", "No.")]
    assert respond(process, episode, "7") is None
    assert process.call("score", episode=episode) == {"reward": 1.0, "metrics": {"found": 1.0}}
    _, episode = begin(process)
    assert [respond(process, episode, text) for text in "123"] == [[("user", "No.")], [("user", "No.")], None]
    assert process.call("score", episode=episode)["reward"] == 0.0


def test_episodes_share_a_tool_server_and_not_its_state(opened):
    process = opened("looked_up")
    assert [tool["function"]["name"] for tool in process.description.tools] == ["facts_lookup"]
    (_, first), (_, second) = begin(process, 0), begin(process, 1)
    assert respond(process, first, "?", look("Ada")) == [("tool", "Ada is number 1")]
    both = [("tool", "Ada is number 1"), ("tool", "Bob is number 2")]
    assert respond(process, second, "?", look("Ada"), look("Bob")) == both
    assert respond(process, first, "?", look("Alan")) == [("tool", "Alan is number 2")]
    assert respond(process, first, "number 2") is None
    assert process.call("score", episode=first) == {"reward": 1.0, "metrics": {"names": 2.0, "said": 1.0}}


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ({"name": "", "arguments": "no object"}, "invalid JSON in tool arguments"),
        ({"name": "nothing", "arguments": "{}"}, "unknown tool 'nothing'"),
        ({"name": "facts_lookup", "arguments": "{}"}, "Field required"),
    ],
)
def test_a_call_that_fails_is_answered(opened, call, words):
    process = opened("looked_up")
    _, episode = begin(process)
    ((role, content),) = respond(process, episode, "?", call)
    assert role == "tool" and words in content
    process.call("close", episode=episode)


def test_a_task_that_has_changed_is_found_out(opened):
    for process in (opened("looked_up"), opened("opened_game")):
        with pytest.raises(DataError, match="the task is another one than when the data was prepared"):
            process.call("reset", episode=process.new_episode(), split="train", row=0, digest="0" * 16)


def test_many_episodes_run_at_once(opened):
    process = opened("sums", **SUMS)
    with ThreadPoolExecutor(16) as threads:
        episodes = [episode for _, episode in threads.map(lambda place: begin(process, place % 3), range(48))]
        assert list(threads.map(lambda each: respond(process, each, "3"), episodes)) == [None] * 48
    rewards = [process.call("score", episode=episode)["reward"] for episode in episodes]
    assert rewards == [1.0, 3.0, 1.0] * 16


@needs_task_sets
def test_the_death_of_the_host_leaves_no_tool_server(modules):
    package = VerifiersPackage(environment="looked_up", python=TASK_SETS, version=1)
    process = VerifiersProcess(package)
    servers = psutil.Process(process.pid).children(recursive=True)
    assert servers
    psutil.Process(process.pid).kill()
    wait_until_ended(servers)
    process.close()


def played(process: VerifiersProcess, row: int, turns: Sequence[Sequence[object]]) -> Score:
    _, episode = begin(process, row)
    for each in turns:
        respond(process, episode, *each)
    found = process.call("score", episode=episode)
    return {"reward": found["reward"], **found["metrics"]}


def turn(text: str | None, *calls: dict[str, str]) -> dict[str, object]:
    """A turn in the form of OpenAI's protocol."""
    functions = [{"id": f"c{place}", "type": "function", "function": call} for place, call in enumerate(calls)]
    return {"content": text, "tool_calls": functions or None}


def by_verifiers(
    environment: str, role: str, cases: Sequence[tuple[int, Sequence[Sequence[object]]]], **configuration: object
) -> list[Score]:
    """Reward and scores of each case: the position of a task, and the policy's turns."""
    asked = {"environment": environment, "role": role, "configuration": configuration}
    made = [{"row": row, "turns": [turn(*each) for each in turns]} for row, turns in cases]
    return own_evaluation(TASK_SETS, "task_set_evaluation.py", **asked, cases=made)


@needs_uv
@pytest.mark.parametrize(
    ("environment", "role", "cases"),
    [
        ("sums", "agent", [(1, [("3",)]), (2, [("3",)])]),
        ("opened_game", "player", [(0, [("3",), ("4",)]), (1, [("1",), ("2",), ("3",)])]),
        (
            "looked_up",
            "agent",
            [(0, [("?", look("Ada")), ("?", look("Alan")), ("It is number 2.",)]), (1, [("number 2",)])],
        ),
    ],
)
def test_scores_are_those_of_verifiers_own_evaluation(opened, environment, role, cases):
    assert [played(opened(environment), row, turns) for row, turns in cases] == by_verifiers(environment, role, cases)


@needs_uv
def test_wordle_of_textarena(opened, tmp_path, monkeypatch):
    """The task set `textarena` of verifiers itself; its interpreter needs `textarena`."""
    few = WORDS[:5]  # so that six guesses find any of them
    write_words(tmp_path, few)
    monkeypatch.setenv("NLTK_DATA", str(tmp_path))
    games = [[(f"[{word}]",) for word in few], [("I pass.",)] * 6]
    taskset = {"game": "Wordle-v0"}
    process = opened("textarena", taskset=taskset, select={"limit": 2})
    cases = [(row, until_over(process, row, game)) for row, game in enumerate(games)]
    theirs = by_verifiers("textarena", "player", cases, taskset=taskset)
    assert [played(process, row, game) for row, game in cases] == theirs
    assert theirs[0]["reward"] == 1.0 and theirs[1]["reward"] < 1.0


def until_over(process: VerifiersProcess, row: int, turns: Sequence[Sequence[object]]) -> list[Sequence[object]]:
    """The first turns of a game, up to its end."""
    _, episode = begin(process, row)
    for place, each in enumerate(turns):
        if respond(process, episode, *each) is None:
            return list(turns[: place + 1])
    raise AssertionError("the game goes on")


# Published environments


@pytest.fixture
def processes(monkeypatch):
    """Those of a test end with it."""
    monkeypatch.setattr("luffy.hosted.verifiers_process._shared", shared := {})
    yield
    for process in shared.values():
        process.close()


class Environment:
    """A published one with few tasks: as it is here, and as verifiers evaluates it."""

    def __init__(self, name: str, split: str = "train", **arguments: object) -> None:
        arguments |= {"num_train_examples": 4, "num_eval_examples": 2}
        self.package = {"kind": "verifiers", "environment": name, "arguments": arguments, "python": PUBLISHED}
        self.config = VerifiersEnvironment(**self.package)
        source = VerifiersSource(**self.package, split=split, num_prompts=4)
        self.prompts: list[Prompt] = list(open_source(source, "train", 0).rows())

    def played(self, prompt: Prompt, turns: Sequence[str], *, may_end_early: bool = False) -> Score:
        environment = open_environment(self.config)()

        async def play() -> None:
            conversation = [*prompt.messages, *await environment.reset(problem_of(prompt))]
            for text in turns:
                conversation.append(Message("assistant", text))
                answer = await environment.respond(tuple(conversation))
                conversation += answer or ()
                if answer is None and may_end_early:
                    break
            assert answer is None
            await environment.score(tuple(conversation))
            await environment.close()

        asyncio.run(play())
        return dict(environment.counts())

    def by_verifiers(self, turns: Sequence[Sequence[Mapping[str, object]]]) -> list[Score]:
        """The same for each prompt, whose turns have the form of OpenAI's protocol."""
        places = [prompt.extra_info["verifiers_task"] for prompt in self.prompts]
        cases = [
            {"split": place["split"], "row": place["row"], "turns": each}
            for place, each in zip(places, turns, strict=True)
        ]
        named = {"environment": self.package["environment"], "arguments": self.package["arguments"]}
        found = own_evaluation(PUBLISHED, "verifiers_evaluation.py", **named, cases=cases)
        return [{"reward": each["reward"], **each["metrics"]} for each in found]


@needs_published
def test_a_single_turn_of_reasoning_gym(processes):
    gym = Environment("reasoning_gym_env", gym="chain_sum")
    sums = [eval(prompt.messages[-1].content.split(":")[-1].strip(" =.")) for prompt in gym.prompts]
    texts = [f"<answer>{sums[0]}</answer>", f"<answer>{sums[1] + 1}</answer>", f"It is {sums[2]}", "<answer>?</answer>"]
    here = [gym.played(prompt, [text]) for prompt, text in zip(gym.prompts, texts, strict=True)]
    assert here == gym.by_verifiers([[{"content": text}] for text in texts])
    assert [scores["reward"] for scores in here][:2] == [1.0, 0.0]


@needs_published
def test_a_game_of_several_turns(processes, tmp_path, monkeypatch):
    write_words(tmp_path)
    monkeypatch.setenv("NLTK_DATA", str(tmp_path))
    wordle = Environment("wordle", "eval")
    games = [
        ["<guess>[crane]</guess>", f"<guess>[{wordle.prompts[0].ground_truth}]</guess>"],
        ["I pass.", *["<guess>[house]</guess>"] * 6],
    ]
    here = [wordle.played(*game, may_end_early=True) for game in zip(wordle.prompts, games, strict=True)]
    assert here == wordle.by_verifiers([[{"content": text} for text in game] for game in games])
    assert here[0]["correct_answer"] == 1.0 and here[0]["num_turns"] == 2.0


@needs_published
def test_calls_of_tools(processes):
    """The tasks of tool-test are drawn without a seed: the host gives every process the same ones."""
    tools = Environment("tool-test")
    assert "tool_A" in instructions_of(tools.config)
    values = {"tool_A": 1, "tool_B": "b", "tool_C": 1.5, "tool_D": True}
    wanted = [prompt.extra_info["info"]["tool_names"] for prompt in tools.prompts]
    called = [wanted[0], wanted[1][:-1], [*wanted[2], "tool_A"], []]

    def written(name: str) -> str:
        return f"<tool_call>\n{json.dumps({'name': name, 'arguments': {'x': values[name]}})}\n</tool_call>"

    texts = ["\n".join(map(written, names)) or "No." for names in called]
    here = [tools.played(prompt, [text]) for prompt, text in zip(tools.prompts, texts, strict=True)]
    asked = [[{"name": name, "arguments": json.dumps({"x": values[name]})} for name in names] for names in called]
    assert here == tools.by_verifiers([[turn(None if calls else "No.", *calls)] for calls in asked])
    assert [scores["reward"] for scores in here][:3:2] == [1.0, 0.0]

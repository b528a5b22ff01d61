"""Environments of verifiers 0.4.0 are played and scored as by verifiers itself.

`LUFFY_TEST_TASK_SETS` names an interpreter with verifiers 0.4.0. The comparisons with verifiers' own evaluation also
need `uv` beside it, which installs what verifiers' chat program needs.
"""

import json
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from support.nltk_words import WORDS, write_words
from support.patience import ran, wait_until_ended

from luffy.config.data import VerifiersPackage
from luffy.errors import ConfigError, DataError
from luffy.hosted.verifiers_process import HostedFault, VerifiersProcess

PYTHON = os.environ.get("LUFFY_TEST_TASK_SETS")
needs_interpreter = pytest.mark.skipif(
    PYTHON is None, reason="needs verifiers 0.4.0: name its interpreter in LUFFY_TEST_TASK_SETS"
)
needs_uv = pytest.mark.skipif(
    PYTHON is None or not Path(PYTHON).with_name("uv").exists(),
    reason="needs uv beside the interpreter that LUFFY_TEST_TASK_SETS names",
)
pytestmark = [pytest.mark.slow, needs_interpreter]
SYNTHETIC = Path(__file__).parents[1] / "synthetic"


@pytest.fixture(scope="module", autouse=True)
def modules():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(SYNTHETIC / "task_sets"))
        yield


@pytest.fixture(scope="module")
def opened():
    """Starts a process for each environment and arguments once."""
    processes = {}

    def start(environment: str, **arguments: object) -> VerifiersProcess:
        key = environment + json.dumps(arguments)
        if key not in processes:
            package = VerifiersPackage(environment=environment, arguments=arguments, python=PYTHON)
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
    process = opened("sums", eval={"taskset": {"split": "test"}, "select": {"limit": 2}})
    assert process.description.tasks == {"train": 3, "eval": 2}
    assert set(process.description.functions) == {"correct", "by_runtime", "characters"}
    first, _ = process.call("tasks", split="train", start=0, stop=2)
    assert [message["content"] for message in first["messages"]] == ["Add.", "1 + 1 ="]
    assert (first["answer"], first["info"]) == ("2", {"level": 1})
    assert process.call("tasks", split="eval", start=1, stop=2)[0]["info"] == {"level": 51}


def test_rewards_that_need_a_runtime_have_one(opened):
    process = opened("sums", eval={"taskset": {"split": "test"}, "select": {"limit": 2}})
    _, episode = begin(process, 1)
    assert respond(process, episode, "3") is None
    scores = {"correct": 1.0, "by_runtime": 1.0, "characters": 1.0}
    assert process.call("score", episode=episode) == {"reward": 3.0, "metrics": scores}


def test_an_episode_without_an_answer_is_scored_and_one_that_is_closed_is_not_missed(opened):
    process = opened("sums", eval={"taskset": {"split": "test"}, "select": {"limit": 2}})
    _, episode = begin(process)
    assert process.call("score", episode=episode)["reward"] == 1.0
    _, closed = begin(process)
    process.call("close", episode=closed)
    _, cut = begin(process)
    assert respond(process, cut, "2", is_cut=True) is None
    assert process.call("score", episode=cut)["reward"] == 3.0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"taskset": {"task": {"fault": "raises"}}}, "scoring: ValueError: no such number"),
        ({"taskset": {"task": {"fault": "not_finite"}}}, "correct returned nan"),
        (
            {"taskset": {"task": {"fault": "late"}}, "agent": {"timeout": {"scoring": 1}}},
            "by_runtime was not computed in time",
        ),
    ],
)
def test_a_score_that_is_missing_is_no_silent_zero(opened, arguments, words):
    process = opened("sums", **arguments)
    _, episode = begin(process)
    with pytest.raises(HostedFault, match=words):
        respond(process, episode, "2")


@pytest.mark.parametrize(
    ("environment", "arguments", "words"),
    [
        ("sums", {"taskset": {"endless": True}}, "SumsTaskset has no last task; set arguments.select"),
        ("sums", {"eval": {"tasks": 3}}, "arguments.eval: unknown key 'tasks'; it takes taskset and select"),
        ("sums", {"taskset": "test"}, "arguments.taskset: 'test' is no mapping"),
        ("sums", {"taskset": {"splits": "x"}}, "taskset.splits Extra inputs are not permitted"),
        ("two_agents", {}, r"played by 2 agents \(proposer, solver\), and the policy can be only one"),
        ("nowhere", {}, "taskset 'nowhere' not found"),
    ],
)
def test_what_cannot_be_used_is_refused_in_one_line(environment, arguments, words):
    with pytest.raises(ConfigError, match=words) as refused:
        VerifiersProcess(VerifiersPackage(environment=environment, arguments=arguments, python=PYTHON))
    assert "\n" not in str(refused.value)


def test_a_conversation_that_the_environment_opens_begins_with_its_first_message(opened):
    process = opened("opened_game")
    messages, episode = begin(process, 1)
    assert messages == ["Which number? Try 6 or more."]
    assert respond(process, episode, "6") == [("user", "No.")]
    assert respond(process, episode, "7") is None
    assert process.call("score", episode=episode) == {"reward": 1.0, "metrics": {"found": 1.0}}


def test_a_stop_condition_ends_the_episode_before_the_policy_is_asked_again(opened):
    process = opened("opened_game")
    _, episode = begin(process)
    assert [respond(process, episode, text) for text in "123"] == [[("user", "No.")], [("user", "No.")], None]
    assert process.call("score", episode=episode)["reward"] == 0.0


@pytest.mark.parametrize(
    ("misbehaves", "words"),
    [
        ("plays_twice", "rewrites earlier messages or begins another conversation"),
        ("answers_for_the_policy", "writes turns of the policy"),
    ],
)
def test_what_no_policy_can_answer_ends_the_episode(opened, misbehaves, words):
    process = opened("opened_game", misbehaves=misbehaves)
    _, episode = begin(process)
    with pytest.raises(HostedFault, match=words):
        respond(process, episode, "1")


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
    process = opened("sums", eval={"taskset": {"split": "test"}, "select": {"limit": 2}})
    with ThreadPoolExecutor(16) as threads:
        episodes = [episode for _, episode in threads.map(lambda place: begin(process, place % 3), range(48))]
        assert list(threads.map(lambda each: respond(process, each, "3"), episodes)) == [None] * 48
    rewards = [process.call("score", episode=episode)["reward"] for episode in episodes]
    assert rewards == [1.0, 3.0, 1.0] * 16


def test_the_death_of_the_host_leaves_no_tool_server(opened):
    package = VerifiersPackage(environment="looked_up", python=PYTHON, version=1)
    process = VerifiersProcess(package)
    servers = psutil.Process(process.pid).children(recursive=True)
    assert servers
    psutil.Process(process.pid).kill()
    wait_until_ended(servers)
    process.close()


def played(process: VerifiersProcess, row: int, turns: Sequence[Sequence[object]]) -> dict[str, float]:
    _, episode = begin(process, row)
    for turn in turns:
        respond(process, episode, *turn)
    found = process.call("score", episode=episode)
    return {"reward": found["reward"], **found["metrics"]}


def own_evaluation(
    environment: str, role: str, cases: Sequence[tuple[int, object]], **configuration: object
) -> list[dict[str, float]]:
    """Reward and scores of each case: the position of a task, and the policy's turns as `said` makes them."""
    asked = {"environment": environment, "role": role, "configuration": configuration}
    result = ran(
        [PYTHON, SYNTHETIC / "task_set_evaluation.py"],
        input=json.dumps({**asked, "cases": [{"row": row, "turns": turns} for row, turns in cases]}) + "\n",
        env={**os.environ, "PATH": f"{Path(PYTHON).parent}:{os.environ['PATH']}"},
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def said(text: str, *calls: dict[str, str]) -> dict[str, object]:
    """A turn in the form of OpenAI's protocol."""
    functions = [{"id": f"c{place}", "type": "function", "function": call} for place, call in enumerate(calls)]
    return {"content": text, "tool_calls": functions}


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
    theirs = own_evaluation(environment, role, [(row, [said(*turn) for turn in turns]) for row, turns in cases])
    assert [played(opened(environment), row, turns) for row, turns in cases] == theirs


@needs_uv
def test_wordle_of_textarena(opened, tmp_path, monkeypatch):
    """The task set `textarena` of verifiers itself; its interpreter needs `textarena`."""
    few = WORDS[:5]  # so that six guesses find any of them
    write_words(tmp_path, few)
    monkeypatch.setenv("NLTK_DATA", str(tmp_path))
    games = [[(f"[{word}]",) for word in few], [("I pass.",)] * 6]
    taskset = {"game": "Wordle-v0"}
    process = opened("textarena", taskset=taskset, select={"limit": 2})
    turns = [until_over(process, row, game) for row, game in enumerate(games)]
    cases = [(row, [said(*turn) for turn in game]) for row, game in enumerate(turns)]
    theirs = own_evaluation("textarena", "player", cases, taskset=taskset)
    assert [played(process, row, game) for row, game in enumerate(turns)] == theirs
    assert theirs[0]["reward"] == 1.0 and theirs[1]["reward"] < 1.0


def until_over(process: VerifiersProcess, row: int, turns: Sequence[Sequence[object]]) -> list[Sequence[object]]:
    """The first turns of a game, up to its end."""
    _, episode = begin(process, row)
    for place, turn in enumerate(turns):
        if respond(process, episode, *turn) is None:
            return list(turns[: place + 1])
    raise AssertionError("the game goes on")

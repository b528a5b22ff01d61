"""Environments of verifiers in a process of their own, from tasks to grades, with a small package in its place."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from support.patience import PATIENCE_S, lives, wait_until
from support.refusals import refused

from luffy.config.data import VerifiersPackage, VerifiersSource
from luffy.config.environment import EpisodeLimits, VerifiersEnvironment
from luffy.config.grading import MeasureGrader
from luffy.config.strict import FOR_IDENTITY
from luffy.data.conversations import ConversationEncoder
from luffy.data.sources import open_source
from luffy.data.templates import encode_traces, stop_token_ids
from luffy.data.tokenizer import build_tokenizer
from luffy.environments.episodes import EpisodePlayer
from luffy.environments.live_episode import EpisodeStart
from luffy.environments.registry import instructions_of, open_environment, open_scored
from luffy.errors import ConfigError, DataError, EnvironmentFault, LostError
from luffy.grading.kinds import steps
from luffy.grading.request import GradeRequest, Problem, problem_of
from luffy.hosted.verifiers_process import HostedFault, VerifiersProcess, shared_process
from luffy.rollout.engine import Completion, SamplingParams
from luffy.types import FinishReason, Message, Outcome

FAKES = Path(__file__).parents[2] / "synthetic" / "fake_verifiers"


@pytest.fixture(autouse=True)
def fake_package(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(FAKES))
    monkeypatch.setattr("luffy.hosted.verifiers_process._shared", shared := {})
    yield
    for process in shared.values():
        process.close()


def package(which):
    return {"environment": "fake-environments", "arguments": {"which": which}, "python": sys.executable}


@pytest.fixture
def opened():
    processes = []

    def start(which, timeout_s=PATIENCE_S):
        processes.append(VerifiersProcess(VerifiersPackage(**package(which), call_timeout_s=timeout_s)))
        return processes[-1]

    yield start
    for process in processes:
        process.close()
        assert not psutil.pid_exists(process.pid)


def begin(process, row=0, split="train"):
    (task,) = process.call("tasks", split=split, start=row, stop=row + 1)
    episode = process.new_episode()
    return episode, process.call("reset", episode=episode, split=split, row=row, digest=task["digest"])


def respond(process, episode, text):
    return process.call("respond", episode=episode, text=text, calls=(), is_cut=False)


def test_games_are_played_by_the_environments_own_rollout_and_do_not_share_their_state(opened):
    process = opened("game")
    (first, opening), (second, _) = begin(process), begin(process, split="eval")
    assert opening == [{"role": "user", "content": "Begin."}]
    assert respond(process, first, "3") == [{"role": "user", "content": "2 left"}]
    assert respond(process, second, "1") is None
    assert process.call("score", episode=second)["reward"] == 1.0
    assert respond(process, first, "2") == [{"role": "user", "content": "1 left"}]
    assert respond(process, first, "1") is None
    assert process.call("score", episode=first)["reward"] == 3.0
    with pytest.raises(HostedFault, match="over"):
        respond(process, first, "0")


UNUSABLE = {
    "of_a_group": "of_a_group compares", "needs_judge": "needs `judge`", "completion": "completes text",
    "own_model": "calls its model itself", "unknown": "KeyError: 'unknown'",
    "without_data": "ConnectionError: the hub is out of reach",
}  # fmt: skip


@pytest.mark.parametrize(("which", "words"), UNUSABLE.items())
def test_what_cannot_be_used_is_refused_in_one_line(opened, which, words):
    with refused(words, error=ConfigError):
        opened(which)


@pytest.mark.parametrize(
    ("which", "scores", "words"),
    [
        ("rewriting", False, "rewrites earlier messages"),
        ("simulated", False, "uses the client of its model by itself"),
        # A reward function that fails is no silent zero.
        ("raises", True, "raises failed: KeyError: 'no such thing'"),
        ("nothing", True, "nothing failed: TypeError"),
    ],
)
def test_what_no_policy_can_answer_ends_the_episode(opened, which, scores, words):
    process, done = opened(which), []
    with pytest.raises(HostedFault, match=words):
        episode, _ = begin(process)
        done.append(respond(process, episode, "2" if scores else "3"))
        process.call("score", episode=episode)
    assert len(done) == scores


def test_a_task_that_has_changed_is_found_out_and_drawn_ones_are_the_same_in_every_process(opened):
    process = opened("sums")
    for row, digest, words in ((0, "of another row", "another one than when"), (9, "", "no task 9 in its split train")):
        with pytest.raises(DataError, match=words):
            process.call("reset", episode=0, split="train", row=row, digest=digest)
    first, second = (opened("drawn").call("tasks", split="train", start=0, stop=1) for _ in range(2))
    assert first == second


def test_a_dead_process_is_the_environments_fault_and_a_killed_one_fails_all_who_wait(opened):
    process = opened("sleeping")
    episode, _ = begin(process)
    for fails in (lambda: respond(process, episode, "die"), lambda: begin(process)):
        with pytest.raises(EnvironmentFault, match="has died"):
            fails()
    process = opened("sleeping")
    episode, _ = begin(process)

    async def wait():
        waiting = asyncio.create_task(process.awaited("respond", episode=episode, text="wait", calls=[], is_cut=False))
        await asyncio.sleep(0)
        os.kill(process.pid, signal.SIGKILL)
        with pytest.raises(LostError, match="was killed"):
            await waiting

    asyncio.run(wait())


def test_an_episode_that_waits_for_ever_fails_alone(opened):
    process = opened("sleeping", timeout_s=1.0)
    (episode, _), (other, _) = begin(process), begin(process)
    with pytest.raises(HostedFault, match=r"did not answer \(respond\) within 1 s"):
        respond(process, episode, "wait")
    assert respond(process, other, "on")[0]["content"] == "8 left"


@pytest.mark.parametrize("reads", [True, False])
def test_a_process_that_hangs_or_reads_no_more_requests_is_killed(opened, monkeypatch, reads):
    """What it does not read is longer than a pipe holds."""
    monkeypatch.setattr("luffy.hosted.verifiers_process._ALIVE_S", 0.5)
    process = opened("sleeping", timeout_s=1.0)
    episode, _ = begin(process)
    if not reads:
        os.kill(process.pid, signal.SIGSTOP)
    with pytest.raises(EnvironmentFault, match="hangs as a whole"):
        respond(process, episode, "hang" if reads else "x" * 10**6)


def test_the_process_ends_with_the_one_that_started_it():
    """However it ends: here by a signal that it cannot handle."""
    script = """if True:
        import os, signal, sys
        from luffy.config.data import VerifiersPackage
        from luffy.hosted.verifiers_process import VerifiersProcess
        package = VerifiersPackage(environment="fake-environments", python=sys.executable)
        print(VerifiersProcess(package).pid, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    done = subprocess.run([sys.executable, "-c", script], check=False, stdout=subprocess.PIPE)
    assert done.returncode == -signal.SIGKILL
    wait_until(lambda: not lives(int(done.stdout)))


def test_an_interpreter_that_is_not_there_has_no_verifiers_or_writes_no_replies_is_named(monkeypatch, tmp_path):
    babbler, deep = tmp_path / "python", "it is nested too deep: 200000 levels"
    for said, why in {"head -c 200000 /dev/zero | tr '\\0' '['; echo": deep, "echo 5": "'int' object is not"}.items():
        babbler.write_text(f"#!/bin/sh\n{said}; sleep 600\n")
        babbler.chmod(0o755)
        with pytest.raises(EnvironmentFault, match=rf"wrote a line that is no reply \({why}"):
            VerifiersProcess(VerifiersPackage(environment="x", python=str(babbler), call_timeout_s=PATIENCE_S))
    monkeypatch.delenv("PYTHONPATH")
    for python, words in (
        ("/no/python", ("environment.python", "/no/python")),
        (sys.executable, ("import verifiers",)),
    ):
        with refused(*words, error=ConfigError):
            VerifiersProcess(VerifiersPackage(environment="x", python=python))


def configured(which, **settings):
    return VerifiersEnvironment(kind="verifiers", **package(which), **settings)


def prompts(which, **settings):
    return list(open_source(VerifiersSource(kind="verifiers", **package(which), **settings), "train", 0).rows())


def test_a_source_has_the_environments_tasks_and_shares_its_process():
    first, second = prompts("sums")
    assert first.messages == (Message("user", "1 + 1 ="),)
    assert (first.ground_truth, first.grader, first.data_source) == ("2", "environment", "verifiers/fake-environments")
    assert second.extra_info["info"] == {"level": 2}
    assert second.extra_info["verifiers_task"]["row"] == 1
    assert first.uid != second.uid
    assert prompts("sums", num_prompts=1) == [first]
    assert [prompt.ground_truth for prompt in prompts("game", split="eval")] == ["1"]
    with refused("data.train.split: ", "has no tasks in eval; there are train (2)"):
        prompts("sums", split="eval")
    source, environment = VerifiersSource(kind="verifiers", **package("sums")), configured("sums")
    limited = configured("sums", limits={"max_turns": 3})
    assert shared_process(limited).pid == shared_process(source).pid
    with refused("has no extra_info.verifiers_task"):  # a prompt of another source
        asyncio.run(open_environment(environment)().reset(Problem(data_source="gsm8k")))
    # Weights may name the environment's functions, and demonstrations are played to be rewarded.
    assert open_scored(environment)[1].needs_demonstrations
    open_scored(configured("sums", scoring={"weights": {"reward": 1.0, "length": -0.01}}))
    with refused("nothing measures lenght"):
        open_scored(configured("sums", scoring={"weights": {"lenght": 1.0}}))
    # Where the package is installed is no part of the identity.
    there = environment.model_copy(update={"python": "/elsewhere/python"})
    assert environment.model_dump_json(context=FOR_IDENTITY) == there.model_dump_json(context=FOR_IDENTITY)
    assert environment.model_dump_json() != there.model_dump_json()


def test_tools_are_described_called_and_answered_in_the_policys_format_and_scores_counted_by_name():
    assert '"name": "square"' in instructions_of(configured("tools"))
    assert instructions_of(configured("tools", describe=False)) == instructions_of(configured("sums")) == ""

    async def play(environment, prompt, *turns):
        conversation, answers = [*prompt.messages, *await environment.reset(problem_of(prompt))], []
        for turn in turns:
            conversation.append(Message("assistant", turn))
            answers.append(await environment.respond(tuple(conversation)))
            conversation += answers[-1] or ()
        await environment.score(tuple(conversation))
        await environment.close()
        return answers, environment.counts()

    call = '<tool_call>\n{"name": "square", "arguments": {"x": 7}}\n</tool_call>'
    turns = (call, "<tool_call>\n{oops}\n</tool_call>", "49")
    answers, scores = asyncio.run(play(open_environment(configured("tools"))(), *prompts("tools"), *turns))
    assert answers[0] == [Message("user", "<tool_response>\n49\n</tool_response>")]
    assert "Expecting value" in answers[1][0].content and answers[2] is None
    assert scores == {"reward": 1.0, "is_right": 1.0, "num_calls": 2.0}
    played = asyncio.run(play(open_environment(configured("sums"))(), prompts("sums")[0], "2"))
    assert played == ([None], {"reward": 1.1, "is_right": 1.0, "length": 1.0})


class Written:
    """A policy that writes one token more of `text` per call, up to the limit of a turn."""

    def __init__(self, ids):
        self._ids = tuple(ids)

    def generate(self, requests, params):
        ids = self._ids[: requests[0].max_new_tokens]
        reason = FinishReason.STOP if len(ids) == len(self._ids) else FinishReason.LENGTH
        return [Completion(ids, (0.0,) * len(ids), reason, (0,) * len(ids)) for _ in requests]


@pytest.mark.parametrize(
    ("which", "limits", "reason", "turns"),
    [
        ("game", {}, FinishReason.STOP, 3.0),
        ("game", {"max_turns": 2}, FinishReason.TURNS, 2.0),
        ("game", {"max_turn_tokens": 1}, FinishReason.TURN_LENGTH, 1.0),
        ("raises", {}, FinishReason.ENVIRONMENT_ERROR, None),  # its reward function
    ],
)
def test_an_episode_is_scored_whatever_ended_it_and_failed_if_that_fails(which, limits, reason, turns):
    """The reward of this game is the number of the policy's turns, a turn that was cut included."""
    tokenizer = build_tokenizer(["Count. Begin. 3 left wait die hang on"] * 4)
    (prompt, *_) = prompts(which)
    make, scorer = open_scored(configured(which))
    player = EpisodePlayer(make, ConversationEncoder(tokenizer), EpisodeLimits(**limits), scorer)
    start = EpisodeStart(problem_of(prompt), prompt.ground_truth, prompt.messages, (1,), seed=0)
    params = SamplingParams(1.0, 400, stop_token_ids(tokenizer))
    policy = Written(encode_traces(tokenizer, ["3 left" if turns else "3"])[0])
    (episode,) = player.play([start], policy, params)
    assert episode.finish_reason is reason and bool(episode.fault) == (turns is None)
    assert turns is None or episode.measures["reward"] == episode.measures["turns"] == turns


def test_the_environments_reward_is_the_grade():
    for grader, measures, outcome, reward in (
        (MeasureGrader(), {"reward": 1.0}, Outcome.CORRECT, 1.0),
        (MeasureGrader(), {"reward": 0.75}, Outcome.WRONG, 0.75),
        (MeasureGrader(), {}, Outcome.CRASHED, 0.0),
        (MeasureGrader(name="found", correct_from=0.5), {"found": 0.5}, Outcome.CORRECT, 0.5),
    ):
        (grade,) = steps(grader, GradeRequest("text", "gold", measures=measures))
        assert (grade.outcome, grade.reward) == (outcome, reward), (grader, measures)

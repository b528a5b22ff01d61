"""Environments of verifiers in a process of their own, with a small package in the place of verifiers."""

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

from luffy.config.data import VerifiersPackage
from luffy.errors import ConfigError, DataError, EnvironmentFault, LostError
from luffy.hosted.verifiers_process import HostedFault, VerifiersProcess

FAKES = Path(__file__).parents[2] / "synthetic" / "fake_verifiers"


@pytest.fixture(autouse=True)
def fake_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(FAKES))


@pytest.fixture
def opened():
    processes = []

    def start(which: str, timeout_s: float = PATIENCE_S, **options: object) -> VerifiersProcess:
        package = VerifiersPackage(
            environment="fake-environments",
            arguments={"which": which, **options},
            python=sys.executable,
            call_timeout_s=timeout_s,
        )
        processes.append(VerifiersProcess(package))
        return processes[-1]

    yield start
    for process in processes:
        process.close()
        assert not psutil.pid_exists(process.pid)


def begin(process: VerifiersProcess, row: int = 0, split: str = "train"):
    (task,) = process.call("tasks", split=split, start=row, stop=row + 1)
    episode = process.new_episode()
    return episode, process.call("reset", episode=episode, split=split, row=row, digest=task["digest"])


def respond(process: VerifiersProcess, episode: int, text: str, *calls: dict[str, str], is_cut: bool = False):
    return process.call("respond", episode=episode, text=text, calls=calls, is_cut=is_cut)


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


@pytest.mark.parametrize(
    ("which", "words"),
    [
        ("group", "of_a_group compares"),
        ("judge", "needs `judge`"),
        ("completion", "completes text"),
        ("own_model", "calls its model itself"),
        ("unknown", "KeyError: 'unknown'"),
        ("without_data", "ConnectionError: the hub is out of reach"),
    ],
)
def test_what_cannot_be_used_is_refused_in_one_line(opened, which, words):
    with refused(words, error=ConfigError):
        opened(which)


@pytest.mark.parametrize(
    ("which", "words"),
    [
        ("rewriting", "rewrites earlier messages"),
        ("simulated", "uses the client of its model by itself"),
        # A reward function that fails is no silent zero.
        ("raises", "raises failed: KeyError: 'no such thing'"),
        ("nothing", "nothing failed: TypeError"),
    ],
)
def test_what_no_policy_can_answer_ends_the_episode(opened, which, words):
    process = opened(which)
    with pytest.raises(HostedFault, match=words):
        episode, _ = begin(process)
        respond(process, episode, "2" if which in ("raises", "nothing") else "3")
        assert which in ("raises", "nothing")
        process.call("score", episode=episode)


def test_a_task_that_has_changed_is_found_out_and_drawn_ones_are_the_same_in_every_process(opened):
    process = opened("sums")
    for row, digest, words in ((0, "of another row", "another one than when"), (9, "", "no task 9 in its split train")):
        with pytest.raises(DataError, match=words):
            process.call("reset", episode=0, split="train", row=row, digest=digest)
    first, second = (opened("drawn").call("tasks", split="train", start=0, stop=1) for _ in range(2))
    assert first == second


def test_a_dead_process_is_the_environments_fault(opened):
    process = opened("sleeping")
    episode, _ = begin(process)
    with pytest.raises(EnvironmentFault, match="has died"):
        respond(process, episode, "die")
    with pytest.raises(EnvironmentFault, match="has died"):
        begin(process)


def test_a_killed_process_fails_all_who_wait(opened):
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
    episode, _ = begin(process)
    other, _ = begin(process)
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


def test_the_process_ends_with_the_one_that_started_it(tmp_path):
    """However it ends: here by a signal that it cannot handle."""
    script = (
        "import os, signal, sys\n"
        "from luffy.config.data import VerifiersPackage\n"
        "from luffy.hosted.verifiers_process import VerifiersProcess\n"
        "package = VerifiersPackage(environment='fake-environments', python=sys.executable)\n"
        f"open({str(tmp_path / 'pid')!r}, 'w').write(str(VerifiersProcess(package).pid))\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == -signal.SIGKILL
    wait_until(lambda: not lives(int((tmp_path / "pid").read_text())))


def test_an_interpreter_that_is_not_there_or_has_no_verifiers_is_named(monkeypatch):
    with refused("environment.python", "/no/python", error=ConfigError):
        VerifiersProcess(VerifiersPackage(environment="x", python="/no/python"))
    monkeypatch.delenv("PYTHONPATH")
    with refused("cannot import verifiers", error=ConfigError):
        VerifiersProcess(VerifiersPackage(environment="x", python=sys.executable))


def test_a_process_that_writes_no_replies_is_ended_and_named(tmp_path):
    babbler = tmp_path / "python"
    babbler.write_text("#!/bin/sh\nhead -c 200000 /dev/zero | tr '\\0' '['; echo; sleep 600\n")
    babbler.chmod(0o755)
    package = VerifiersPackage(environment="x", python=str(babbler), call_timeout_s=PATIENCE_S)
    with pytest.raises(EnvironmentFault, match=r"wrote a line that is no reply \(it is nested too deep: 200000 levels"):
        VerifiersProcess(package)

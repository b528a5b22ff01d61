"""`luffy export-environment`: our environments as task sets of verifiers, played and scored as by our own evaluation.

The process that plays them is spoken to directly. What verifiers itself makes of them needs an interpreter with
verifiers 0.4.0 (`tests/integration/test_task_sets.py`).
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path

import psutil
import pytest
from patience import wait_until
from synthetic.endpoint import CHAT, Endpoint, completion
from synthetic.own_evaluation import PYTHON, needs_interpreter, needs_uv, own_evaluation, said

from luffy.cli.main import main
from luffy.config import load_experiment
from luffy.config.execution import ServerConfig
from luffy.config.model import EndpointModel
from luffy.config.verifiers_package import VerifiersPackage
from luffy.environments.exported.export_folder import PlayedAndGraded, write_export
from luffy.environments.live_episode import EpisodeStart
from luffy.environments.players import open_text_player
from luffy.errors import ConfigError, DataError
from luffy.grading import GradeRequest, GraderPool, problem_of
from luffy.grading.judge import Judges
from luffy.hosted.verifiers_process import HostedFault, VerifiersProcess
from luffy.pipeline.experiment import ExperimentRun, Unwatched, open_experiment
from luffy.pipeline.workspace import Workspace
from luffy.rollout.engine import SamplingParams
from luffy.rollout.text_answers import TextAnswers
from luffy.rollout.text_endpoint import TextEndpoint
from luffy.types import Message, Outcome, Prompt

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
MATH = {"timeout_s": 5.0, "kind": {"kind": "math", "boxed": "required"}}
EXACT = {"timeout_s": 5.0, "kind": {"kind": "exact"}}
WEIGHTS = {"answer": 1.0, "tool_errors": -0.25, "words": 0.125}
TOOLS = {
    "kind": "tools",
    "tools": ["calculator"],
    "limits": {"max_turns": 3},
    "scoring": {"weights": WEIGHTS, "measures": {"words": "synthetic.episode_measures:words"}},
}
GAME = {"kind": "guess_number", "limits": {"max_turns": 4}}
OPENING = {"kind": "custom", "factory": "synthetic.opening_game:OpeningGame", "limits": {"max_turns": 3}}
KINDS = {
    "tools": PlayedAndGraded.of({"environment": TOOLS, "grading": MATH}),
    "game": PlayedAndGraded.of({"environment": GAME, "grading": EXACT}),
    "opening": PlayedAndGraded.of({"environment": OPENING, "grading": EXACT}),
    "single_turn": PlayedAndGraded.of({"environment": None, "grading": MATH}),
}
SYSTEM = Message("system", "You have a calculator.")


def problem(text: str, answer: str, *before: Message, **info: object) -> Prompt:
    return Prompt(f"uid {text}", "made", (*before, Message("user", text)), answer, extra_info=info)


PROBLEMS = {
    "tools": [problem("What is 17 * 3?", "51", SYSTEM), problem("What is 2 + 2?", "4")],
    "game": [problem("Guess.", "3", number=3), problem("Guess!", "6", number=6)],
    "opening": [problem("A game.", "sun", word="sun")],
    "single_turn": [problem("What is 1 + 1?", "2")],
}


def calls(expression: str) -> str:
    call = json.dumps({"name": "calculator", "arguments": {"expression": expression}})
    return f"<think>\nI should compute.\n</think>\n\n<tool_call>\n{call}\n</tool_call>"


CASES = {
    "tools": [
        (0, [calls("17 * 3"), "It is \\boxed{51}."]),
        (1, [calls("2 +"), calls("2 + 2"), "\\boxed{5}"]),
        (1, [calls("1"), calls("2"), calls("3"), "\\boxed{4}"]),
    ],
    "game": [(0, ["2", "what?", "3"]), (1, ["1", "2", "3", "4", "6"])],
    "opening": [(0, ["moon", "sun"]), (0, ["moon", "moon", "moon", "sun"])],
    "single_turn": [(0, ["\\boxed{2}"]), (0, ["2"])],
}
"""Problems, and what the policy says, with a turn more than some limits allow."""
each_kind = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture(autouse=True)
def modules(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT / 'tests'}:{ROOT}")


def exported(kind: str, folder: Path) -> Path:
    """The folder of the module `of_<kind>`, which is importable in other processes."""
    out = folder / f"export_{kind}"
    write_export(KINDS[kind], {"train": PROBLEMS[kind]}, out, f"of_{kind}")
    module = folder / f"of_{kind}"
    (out / f"of_{kind}").rename(module)
    return module


SERVICE = "luffy.environments.exported.environment_service"
STARTER = f"""
import subprocess, sys
command = [sys.executable, "-m", "{SERVICE}", sys.argv[1]]
service = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
for order in sys.argv[2:]:
    service.stdin.write(order + chr(10))
    service.stdin.flush()
    reply = service.stdout.readline()
print(service.pid, reply, flush=True)
service.wait()
"""
"""Starts the process that plays an export, has it follow orders, and says its process id and the last reply."""


class Spoken:
    """The process that plays an export, spoken to as the task set does."""

    def __init__(self, module: Path) -> None:
        command = [sys.executable, "-m", SERVICE, str(module)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._number = 0
        self.loaded = self.ask("load")

    def ask(self, op: str, **request: object) -> dict:
        self._number += 1
        self.process.stdin.write(json.dumps({"id": self._number, "op": op, **request}) + "\n")
        self.process.stdin.flush()
        reply = json.loads(self.process.stdout.readline())
        assert reply.pop("id") == self._number
        return reply

    def begin(self, episode: int, row: int, split: str = "train") -> dict:
        return self.ask("reset", episode=episode, split=split, row=row, digest="")

    def respond(self, episode: int, text: str, *, is_cut: bool = False) -> dict:
        return self.ask("respond", episode=episode, text=text, calls=[], is_cut=is_cut)

    def played(self, row: int, turns: Sequence[str]) -> dict[str, float]:
        self.begin(1, row)
        for turn in turns:
            if self.respond(1, turn)["ok"] is None:
                break
        found = self.ask("score", episode=1)["ok"]
        self.ask("close", episode=1)
        return {"reward": found["reward"], **found["metrics"]}

    def close(self) -> int:
        self.process.stdin.close()
        return self.process.wait()


@pytest.fixture(scope="module")
def spoken(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Spoken]]:
    """Starts the process of a kind once."""
    folder, opened = tmp_path_factory.mktemp("exported"), dict[str, Spoken]()

    def start(kind: str) -> Spoken:
        if kind not in opened:
            opened[kind] = Spoken(exported(kind, folder))
        return opened[kind]

    yield start
    for each in opened.values():
        assert each.close() == 0


def own_scores(kind: str, row: int, turns: Sequence[str], folder: Path) -> dict[str, float]:
    """By our own evaluation of a model behind an endpoint, which says the n-th turn after n - 1 of them."""
    played, prompt = KINDS[kind], PROBLEMS[kind][row]

    def say(_: str, body: dict) -> object:
        return completion(turns[sum(message["role"] == "assistant" for message in body["messages"])])

    with GraderPool(1, 5.0, played.grading) as grader:
        if played.environment is None:
            (grade,) = grader.grade([GradeRequest(turns[0], prompt.ground_truth, problem_of(prompt))])
            return {"reward": grade.reward, "correct": float(grade.outcome is Outcome.CORRECT)}
        server = Endpoint(say, (CHAT,))
        config = ServerConfig(urls=(server.url,), max_retries=0)
        (folder / "answers.jsonl").unlink(missing_ok=True)  # each case has answers of its own
        answers = TextAnswers(folder / "answers.jsonl")
        endpoint = TextEndpoint.connect(EndpointModel(name="x"), config, ("/chat/completions",), answers)
        start = EpisodeStart(problem_of(prompt), prompt.ground_truth, prompt.messages, (), 0)
        with closing(server), closing(answers), closing(endpoint), closing(Judges(None)) as judges:
            player = open_text_player(played.environment, judges)
            (episode,) = player.play([start], endpoint, SamplingParams(1.0, 512, ()))
        reply = [turn.content for turn in episode.completion if turn.role == "assistant"][-1]
        request = GradeRequest(reply, prompt.ground_truth, problem_of(prompt), measures=episode.measures)
        (grade,) = grader.grade([request])
    reward = player.scorer.reward(grade.reward, episode.measures)
    return {"reward": reward, "correct": float(grade.outcome is Outcome.CORRECT), **episode.measures}


@each_kind
def test_scores_are_those_of_our_own_evaluation(kind: str, spoken: Callable[[str], Spoken], tmp_path: Path) -> None:
    service = spoken(kind)
    found = [service.played(row, turns) for row, turns in CASES[kind]]
    assert found == [own_scores(kind, row, turns, tmp_path) for row, turns in CASES[kind]]
    assert len({scores["reward"] for scores in found}) > 1  # the cases tell something apart


def test_an_environment_answers_turn_by_turn(spoken: Callable[[str], Spoken]) -> None:
    service = spoken("tools")
    assert service.loaded["ok"]["tasks"] == {"train": 2}
    assert service.begin(7, 0) == {"ok": []}
    ((message,),) = service.respond(7, calls("17 * 3")).values()
    assert message["role"] == "user" and "51" in message["content"]
    assert service.respond(7, "\\boxed{51}") == {"ok": None}
    assert "the episode is over" in service.respond(7, "more")["fault"]
    opening = spoken("opening")
    assert opening.begin(1, 0) == {"ok": [{"role": "user", "content": "Which word?"}]}
    assert opening.respond(1, "moon") == {"ok": [{"role": "user", "content": "Another one."}]}  # from the role `tool`


def test_an_episode_that_the_other_side_ends_is_scored(spoken: Callable[[str], Spoken]) -> None:
    service = spoken("game")
    assert service.begin(1, 0) == {"ok": []}
    service.respond(1, "2")
    assert service.ask("score", episode=1)["ok"]["metrics"]["turns"] == 1.0
    service.begin(2, 0)
    assert service.respond(2, "3", is_cut=True) == {"ok": None}
    assert service.ask("score", episode=2)["ok"]["metrics"]["found"] == 0.0  # the cut turn was not played


def test_what_fails_is_said_in_one_line(spoken: Callable[[str], Spoken], tmp_path: Path) -> None:
    service = spoken("opening")
    assert service.begin(1, 1) == {"task": "there is no problem 1 in the split train"}
    assert service.begin(1, 0, "test") == {"task": "there is no problem 0 in the split test"}
    service.begin(1, 0)
    assert service.respond(1, "break") == {"fault": "ValueError: no such word"}
    module = exported("opening", tmp_path)
    (module / "export.json").write_text("{}")
    broken = Spoken(module)
    assert "export.json: not written by this version of luffy" in broken.loaded["refused"]
    assert "\n" not in broken.loaded["refused"]
    assert broken.process.wait() == 0


def test_the_process_and_its_graders_end_with_the_one_that_started_it(tmp_path: Path) -> None:
    module = exported("single_turn", tmp_path)
    answer = "\\boxed{\\sqrt{4}}"  # compared by a worker
    episode = {"episode": 1, "split": "train", "row": 0, "digest": "", "text": answer, "calls": [], "is_cut": False}
    operations = ("load", "reset", "respond", "score")
    orders = [json.dumps({"id": place, "op": op, **episode}) for place, op in enumerate(operations)]
    parent = subprocess.Popen([sys.executable, "-c", STARTER, module, *orders], stdout=subprocess.PIPE, text=True)
    try:
        pid, reply = parent.stdout.readline().split(maxsplit=1)
        assert json.loads(reply)["ok"]["reward"] == 1.0
        service = psutil.Process(int(pid))
        family = [service, *service.children(recursive=True)]
    finally:
        parent.kill()
        parent.wait()
    assert len(family) > 1  # graders
    wait_until(lambda: not any(each.is_running() and each.status() != psutil.STATUS_ZOMBIE for each in family))


def test_the_command_exports_what_a_run_has_prepared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = ["data.suites.games.num_prompts=2", "data.corpus.num_prompts=256"]
    where = ["--workspace", str(tmp_path / "workspace")]
    config = load_experiment(ROOT / "exp_configs" / "guess_number.yaml", small)
    experiment = open_experiment(config, Workspace(tmp_path / "workspace"))
    run = ExperimentRun(experiment, experiment.workspace.new_run("guess_number", {}))
    run.execute("prepare_data", Unwatched())
    run.close("finished")
    out = tmp_path / "task_set"
    assert main(["export-environment", "guess_number", str(out), *where]) == 0
    assert "256 of train, 2 of games" in capsys.readouterr().out
    module = out / "luffy_guess_number"
    assert {path.name for path in module.iterdir()} == {"__init__.py", "export.json", "train.jsonl", "games.jsonl"}
    service = Spoken(module)
    assert service.loaded["ok"]["tasks"] == {"train": 256, "games": 2}
    number = json.loads((module / "games.jsonl").read_text().splitlines()[1])["info"]["number"]
    service.begin(1, 1, "games")
    assert service.respond(1, str(number)) == {"ok": None}
    assert service.ask("score", episode=1)["ok"]["reward"] == 1.0
    assert service.close() == 0
    assert main(["export-environment", "guess_number", str(out), *where]) == 2
    assert "is not empty" in capsys.readouterr().err
    assert main(["export-environment", "guess_number", str(tmp_path / "b"), "--name", "A-b", *where]) == 2
    assert "--name A-b: must be the name of a module" in capsys.readouterr().err
    assert main(["export-environment", "nothing", str(tmp_path / "b"), *where]) == 2


def test_what_cannot_be_exported_is_refused(tmp_path: Path) -> None:
    ranked = {**GAME, "scoring": {"group_measures": {"rank": "synthetic.episode_measures:rank"}}}
    theirs = {"kind": "verifiers", "environment": "wordle", "python": sys.executable}
    for environment, words in ((ranked, "group_measures"), (theirs, "wordle is one of verifiers already")):
        with pytest.raises(ConfigError, match=words):
            write_export(
                PlayedAndGraded.of({"environment": environment, "grading": EXACT}),
                {"train": PROBLEMS["game"]},
                tmp_path / "x",
                "x",
            )
    hidden = problem("A secret.", "1", confidential=True)
    with pytest.raises(DataError, match="confidential"):
        write_export(KINDS["single_turn"], {"train": [hidden]}, tmp_path / "x", "x")
    written = write_export(KINDS["single_turn"], {"train": [hidden, *PROBLEMS["single_turn"]]}, tmp_path / "x", "x")
    assert (dict(written.counts), written.num_hidden) == ({"train": 1}, 1)
    assert "secret" not in (tmp_path / "x" / "x" / "train.jsonl").read_text()


@needs_interpreter
@needs_uv
@each_kind
def test_verifiers_own_evaluation_gives_the_same_scores(kind: str, tmp_path: Path) -> None:
    exported(kind, tmp_path)
    cases = [(row, [said(turn) for turn in turns]) for row, turns in CASES[kind]]
    theirs = own_evaluation(f"of_{kind}", "policy", cases)
    assert theirs == [own_scores(kind, row, turns, tmp_path) for row, turns in CASES[kind]]


@needs_interpreter
@each_kind
def test_an_export_comes_back_as_an_environment_of_verifiers(kind: str, tmp_path: Path) -> None:
    exported(kind, tmp_path)
    process = VerifiersProcess(VerifiersPackage(environment=f"of_{kind}", python=PYTHON))
    assert process.description.tasks["train"] == len(PROBLEMS[kind])
    for row, turns in CASES[kind]:
        (task,) = process.call("tasks", split="train", start=row, stop=row + 1)
        assert task["messages"][-1]["content"] == PROBLEMS[kind][row].messages[-1].content
        episode = process.new_episode()
        process.call("reset", episode=episode, split="train", row=row, digest=task["digest"])
        for turn in turns:
            if process.call("respond", episode=episode, text=turn, calls=[], is_cut=False) is None:
                break
        found = process.call("score", episode=episode)
        own = own_scores(kind, row, turns, tmp_path)
        assert found["reward"] == own["reward"]
        assert {name: found["metrics"][name] for name in own} == own
    children = psutil.Process(process.pid).children(recursive=True)
    assert any("environment_service" in " ".join(child.cmdline()) for child in children)
    os.kill(process.pid, signal.SIGKILL)
    wait_until(lambda: not any(each.is_running() and each.status() != psutil.STATUS_ZOMBIE for each in children))
    process.close()


@needs_interpreter
def test_a_process_that_cannot_be_started_and_an_environment_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exported("opening", tmp_path)
    package = VerifiersPackage(environment="of_opening", python=PYTHON)
    monkeypatch.setenv("LUFFY_PYTHON", "/nowhere/python")
    with pytest.raises(ConfigError, match="/nowhere/python: no such file; set LUFFY_PYTHON"):
        VerifiersProcess(package)
    monkeypatch.delenv("LUFFY_PYTHON")
    process = VerifiersProcess(package)
    (task,) = process.call("tasks", split="train", start=0, stop=1)
    episode = process.new_episode()
    process.call("reset", episode=episode, split="train", row=0, digest=task["digest"])
    with pytest.raises(HostedFault, match="ValueError: no such word"):
        process.call("respond", episode=episode, text="break", calls=[], is_cut=False)
    process.close()

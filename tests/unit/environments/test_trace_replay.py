"""Demonstrations played again: what the environment answers otherwise than recorded is found, counted, and rejected."""

import json
import pickle
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from luffy.config import load_experiment
from luffy.config.data import ArithmeticSource, DataConfig, GuessNumberSource
from luffy.config.environment import GuessNumberEnvironment, ToolsEnvironment
from luffy.config.execution import ExecutionConfig, TrackingConfig
from luffy.config.grading import ExactGrader, GradingConfig
from luffy.config.sandbox import SandboxConfig
from luffy.config.settings import PrepareDataSettings
from luffy.data.conversations import cut
from luffy.data.parquet import read_prompts, write_prompts
from luffy.data.row_filters import Replayed
from luffy.environments.call_formats import HermesCalls, ToolCall
from luffy.environments.trace_replay import EnvironmentReplayer
from luffy.errors import LostError
from luffy.pipeline.events import EventWriter
from luffy.stages.prepare_data import run
from luffy.stages.program import StageContext
from luffy.types import Message, Prompt, Trace
from tests.synthetic.loaded_source import load_source

GAME = GuessNumberEnvironment(kind="guess_number")
UNCONFINED = SandboxConfig(kind="unsafe_local", unsafe_local=True)
"""The tests' own code is trusted, and `bwrap` is not installed everywhere."""


def games(count: int) -> list[Prompt]:
    """Games that take more than one guess."""
    source = GuessNumberSource(kind="guess_number", num_prompts=60, high=31)
    return [prompt for prompt in load_source(source, "train", 3).prompts if len(prompt.traces[0].turns) > 1][:count]


def forged(prompt: Prompt) -> Prompt:
    """The game with its first answer turned round."""
    (trace,) = prompt.traces
    told = {"higher": "lower", "lower": "higher"}[trace.turns[1].content]
    turns = (trace.turns[0], Message("user", told), *trace.turns[2:])
    return replace(prompt, traces=(replace(trace, turns=turns),))


def test_a_forged_answer_is_found() -> None:
    first, second, third = games(3)
    replayer = EnvironmentReplayer(GAME)
    with_single_turn = replace(third, traces=(*third.traces, Trace(third.ground_truth, "me")))
    expected = [[Replayed.SAME], [Replayed.DIFFERS], [Replayed.SAME, None]]
    assert replayer.replay([first, forged(second), with_single_turn]) == expected
    assert pickle.loads(pickle.dumps(replayer)).replay([first, forged(second)]) == expected[:2]


def calling(tool: str, arguments: list[dict[str, object]], answers: list[str]) -> Prompt:
    """A demonstration with these calls and recorded results."""
    syntax = HermesCalls()
    turns: list[Message] = []
    for given, answer in zip(arguments, answers, strict=True):
        turns += [Message("assistant", syntax.render([ToolCall(tool, given)])), *syntax.results([answer])]
    turns.append(Message("assistant", r"\boxed{42}"))
    return Prompt("u", "calls", (Message("user", "6 * 7"),), "42", (Trace("", "me", turns=tuple(turns)),))


def test_a_python_session_is_played_again_in_a_sandbox() -> None:
    codes = [{"code": "x = 6"}, {"code": "x * 7"}]
    config = ToolsEnvironment(kind="tools", tools=("python",), sandbox=UNCONFINED)
    found = EnvironmentReplayer(config).replay([calling("python", codes, ["", each]) for each in ("42", "41")])
    assert found == [[Replayed.SAME], [Replayed.DIFFERS]]


def test_a_cut_record_matches_the_whole_answer() -> None:
    shown = cut("0123\ufffd", 892, "tokens", "\ufffd6789")
    codes = [{"code": code} for code in ("print('0123456789' * 90)", "print('0123456789' * 90, 8)")]
    config = ToolsEnvironment(kind="tools", tools=("python",), sandbox=UNCONFINED)
    found = EnvironmentReplayer(config).replay([calling("python", [code], [shown]) for code in codes])
    assert found == [[Replayed.SAME], [Replayed.DIFFERS]]


def test_an_environment_that_fails_is_told_from_one_that_answers_otherwise(caplog: pytest.LogCaptureFixture) -> None:
    config = ToolsEnvironment(kind="tools", tools=("synthetic.sample_tools:fail_for_good",))
    assert EnvironmentReplayer(config).replay([calling("fail_for_good", [{}], ["42"])]) == [[Replayed.CRASHED]]
    assert "cannot be played again" in caplog.text


def test_an_environment_that_is_lost_says_nothing_of_the_trace() -> None:
    config = ToolsEnvironment(kind="tools", tools=("synthetic.sample_tools:lose_service",))
    with pytest.raises(LostError, match="the service is gone"):
        EnvironmentReplayer(config).replay([calling("lose_service", [{}], ["42"])])


@pytest.mark.parametrize(("rule", "num_kept"), [("off", 10), ("keep", 10), ("reject", 8)])
def test_prepared_traces_are_counted_and_kept_or_rejected_by_rule(tmp_path: Path, rule: str, num_kept: int) -> None:
    prompts = games(10)
    write_prompts(tmp_path / "games.parquet", [*map(forged, prompts[:2]), *prompts[2:]])
    data = DataConfig.model_validate(
        {
            "train": {"kind": "file", "path": str(tmp_path / "games.parquet")},
            "suites": {"games": {"kind": "guess_number", "num_prompts": 2, "high": 15}},
            "max_prompt_tokens": 64,
            "max_trace_tokens": 64,
            "replay_traces": rule,
        }
    )
    grading = GradingConfig(kind=ExactGrader())
    settings = PrepareDataSettings(
        seed=7, data=data, grading=grading, model_path=None, chat_template=None, environment=GAME
    )
    out = tmp_path / "out"
    out.mkdir()
    execution, events = ExecutionConfig(data_workers=1), EventWriter(out / "events.jsonl")
    run(settings, StageContext(out, {}, "key", "prepare_data", execution, TrackingConfig(), events))
    assert len(read_prompts(out / "train.parquet")) == num_kept
    card = json.loads((out / "card.json").read_text())["sources"]["train"]
    assert card["replays"] == ({} if rule == "off" else {"same": 8, "differs": 2})
    assert card["rejected_traces"] == ({"trace_replay_differs": 2} if rule == "reject" else {})
    assert ("| traces played again | differs | 2 |" in (out / "card.md").read_text()) == (rule != "off")


ROOT = Path(__file__).parents[3]


def _replayed(experiment: str, prompts: Sequence[Prompt]) -> list[list[Replayed | None]]:
    config = load_experiment(ROOT / "exp_configs" / experiment, []).environment
    assert config is not None
    return EnvironmentReplayer(config).replay(prompts)


def _games(**settings: object) -> list[Prompt]:
    return load_source(GuessNumberSource(kind="guess_number", num_prompts=60, **settings), "train", 3).prompts


def _chains() -> list[Prompt]:
    source = ArithmeticSource(
        kind="arithmetic",
        num_prompts=60,
        num_operations=(1, 3),
        operations={"add": 1.0, "reverse": 1.0, "multiply": 2.0},
        by_calculator=("multiply",),
    )
    return [prompt for prompt in load_source(source, "train", 3).prompts if prompt.traces[0].turns]


def test_the_calculator_answers_what_the_teacher_recorded() -> None:
    prompts = _chains()
    assert len(prompts) > 30
    assert _replayed("tools.yaml", prompts) == [[Replayed.SAME]] * len(prompts)
    for prompt in prompts:
        assert prompt.traces[0].reply.endswith(rf"\boxed{{{prompt.ground_truth}}}")
        num_products = prompt.messages[0].content.count("*")
        calls = [turn for turn in prompt.traces[0].turns if "<tool_call>" in turn.content]
        assert len(calls) == num_products > 0


def test_the_game_answers_what_the_player_recorded() -> None:
    assert _replayed("guess_number.yaml", _games()) == [[Replayed.SAME]] * 60
    assert all(prompt.traces[0].reply == prompt.ground_truth for prompt in _games())


@pytest.mark.parametrize(("player", "share"), [("bisecting", 1.0), ("random", 0.4)])
def test_halving_the_interval_finds_every_number_in_six_guesses(player: str, share: float) -> None:
    games = _games(player=player, max_turns=6)
    found = [prompt.traces[0].reply == prompt.ground_truth for prompt in games]
    assert all(found) if share == 1.0 else sum(found) < share * len(found)

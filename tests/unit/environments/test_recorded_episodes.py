"""The generated demonstrations of many turns: what they record is what the live environment answers."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from luffy.config import load_experiment
from luffy.config.data import ArithmeticSource, GuessNumberSource
from luffy.data.parquet import read_prompts, write_prompts
from luffy.environments.registry import open_environment
from luffy.grading.request import problem_of
from luffy.types import Message, Prompt
from tests.synthetic.loaded_source import load_source

ROOT = Path(__file__).parents[3]


async def _answers(experiment: str, prompt: Prompt) -> list[Sequence[Message] | None]:
    """What the environment of an experiment answers to each of the trace's own turns."""
    config = load_experiment(ROOT / "exp_configs" / experiment, []).environment
    assert config is not None
    environment = open_environment(config)()
    conversation = [*prompt.messages, *await environment.reset(problem_of(prompt))]
    answers = []
    for turn in prompt.traces[0].turns:
        conversation.append(turn)
        if turn.role == "assistant":
            answers.append(await environment.respond(conversation))
    await environment.close()
    return answers


def _recorded(prompt: Prompt) -> list[Sequence[Message] | None]:
    return [*([turn] for turn in prompt.traces[0].turns if turn.role != "assistant"), None]


def _games(**settings: object) -> list[Prompt]:
    return load_source(GuessNumberSource(kind="guess_number", num_prompts=60, **settings), "train", 3).prompts


def _chains(num_prompts: int = 60) -> list[Prompt]:
    source = ArithmeticSource(
        kind="arithmetic",
        num_prompts=num_prompts,
        num_operations=(1, 3),
        operations={"add": 1.0, "reverse": 1.0, "multiply": 2.0},
        by_calculator=("multiply",),
    )
    return [prompt for prompt in load_source(source, "train", 3).prompts if prompt.traces[0].turns]


def test_the_calculator_answers_what_the_teacher_recorded() -> None:
    prompts = _chains()
    assert len(prompts) > 30
    for prompt in prompts:
        assert asyncio.run(_answers("tools.yaml", prompt)) == _recorded(prompt)
        assert prompt.traces[0].reply.endswith(rf"\boxed{{{prompt.ground_truth}}}")


def test_multiplications_of_a_chain_are_the_teachers_calls_and_nothing_else() -> None:
    for prompt in _chains():
        num_products = prompt.messages[0].content.count("*")
        calls = [turn for turn in prompt.traces[0].turns if "<tool_call>" in turn.content]
        assert len(calls) == num_products > 0


def test_the_game_answers_what_the_player_recorded() -> None:
    for prompt in _games():
        assert asyncio.run(_answers("guess_number.yaml", prompt)) == _recorded(prompt)
        assert prompt.traces[0].reply == prompt.ground_truth


@pytest.mark.parametrize(("player", "share"), [("bisecting", 1.0), ("random", 0.4)])
def test_halving_the_interval_finds_every_number_in_six_guesses(player: str, share: float) -> None:
    games = _games(player=player, max_turns=6)
    found = [prompt.traces[0].reply == prompt.ground_truth for prompt in games]
    assert all(found) if share == 1.0 else sum(found) < share * len(found)


def test_traces_of_many_turns_come_back_from_parquet(tmp_path: Path) -> None:
    prompts = [*_games(), *_chains()]
    write_prompts(tmp_path / "prompts.parquet", prompts)
    assert read_prompts(tmp_path / "prompts.parquet") == prompts

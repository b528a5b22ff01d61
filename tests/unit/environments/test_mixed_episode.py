"""A mixture of environments: which part plays, what it counts, and what is refused."""

import asyncio
import json
from dataclasses import replace

import pytest
from pydantic import ValidationError

from luffy.config.environment import MixtureEnvironment
from luffy.data.row_filters import with_instructions
from luffy.environments.mixed_episode import MixedEpisode
from luffy.environments.players import open_scored
from luffy.environments.registry import instructions_by_source, open_environment
from luffy.errors import ConfigError, DataError
from luffy.grading.request import Problem
from luffy.types import Message, Prompt


def mixture(**scoring: object) -> MixtureEnvironment:
    parts = {
        "tools": {"environment": {"kind": "tools", "tools": ["calculator"]}, "plays": ["sums", "products"]},
        "game": {"environment": {"kind": "guess_number"}, "plays": ["games"]},
    }
    return MixtureEnvironment.model_validate_json(json.dumps({"kind": "mixture", "parts": parts, "scoring": scoring}))


def begun(data_source: str, **info: object) -> MixedEpisode:
    episode = open_environment(mixture())()
    assert isinstance(episode, MixedEpisode)
    asyncio.run(episode.reset(Problem(data_source=data_source, extra_info=info)))
    return episode


def test_the_part_that_names_the_data_source_plays() -> None:
    game = begun("games", number=5)
    assert asyncio.run(game.respond([Message("user", "?"), Message("assistant", "3")])) == [Message("user", "higher")]
    assert game.counts() == {
        "part/tools": 0.0, "part/game": 1.0,
        "game/guesses": 1.0, "game/turns_without_guess": 0.0, "game/found": 0.0,
    }  # fmt: skip
    assert begun("products").counts()["part/tools"] == 1.0


def test_a_prompt_that_no_part_plays_is_refused_in_one_line() -> None:
    with pytest.raises(DataError, match=r"no part plays the data source 'poems'; add it to the `plays` of one \(they"):
        begun("poems")
    poem = Prompt("p", "poems", (Message("user", "?"),), "")
    with pytest.raises(DataError, match="no part plays the data source 'poems'"):
        with_instructions([poem], instructions_by_source(mixture()))


def test_each_prompt_gets_the_instructions_of_its_part() -> None:
    prompt = Prompt("p", "sums", (Message("user", "?"),), "")
    sums, game = with_instructions([prompt, replace(prompt, data_source="games")], instructions_by_source(mixture()))
    assert "calculator" in sums.messages[0].content
    assert game.messages == prompt.messages


def test_a_count_of_one_part_weighs_nothing_in_the_other() -> None:
    _, scorer = open_scored(mixture(weights={"answer": 1.0, "tools/tool_errors": -0.1, "game/found": 0.5}))
    assert scorer.reward(1.0, {"game/found": 1.0}) == 1.5
    assert scorer.reward(1.0, {"tools/tool_errors": 2.0}) == pytest.approx(0.8)
    with pytest.raises(ConfigError, match="nothing measures tool_errors"):
        open_scored(mixture(weights={"tool_errors": -0.1}))


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"environment": {"kind": "guess_number"}, "plays": ["sums"]}, "sums is played by tools already"),
        (
            {"environment": {"kind": "guess_number", "limits": {"max_turns": 3}}, "plays": ["games"]},
            "the mixture has one for all parts; move it there",
        ),
        ({"environment": {"kind": "mixture", "parts": {}}, "plays": ["games"]}, "mixture"),
    ],
)
def test_parts_that_cannot_be_told_apart_are_refused(part: dict[str, object], message: str) -> None:
    values = mixture().model_dump()
    with pytest.raises(ValidationError, match=message):
        MixtureEnvironment.model_validate_json(json.dumps({**values, "parts": {**values["parts"], "game": part}}))

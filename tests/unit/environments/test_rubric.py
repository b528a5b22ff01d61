"""The rubric of an episode: named measures, and the reward that their weights make."""

import asyncio

import pytest

from luffy.config.environment import EpisodeScoring
from luffy.environments.rubric import EpisodeScorer, EpisodeView
from luffy.errors import ConfigError
from luffy.types import Message

COMPLETION = (Message("assistant", "3 + 4"), Message("user", "7"), Message("assistant", "7"))
VIEW = EpisodeView((Message("user", "Begin."),), COMPLETION, "7", {"level": 1}, "sums", {"calls": 2.0})


def scorer(weights: dict[str, float] | None = None, **measures: str) -> EpisodeScorer:
    paths = {name: f"synthetic.episode_measures:{function}" for name, function in measures.items()}
    settings: dict[str, object] = {"measures": paths}
    if weights is not None:
        settings["weights"] = weights
    return EpisodeScorer(EpisodeScoring(**settings), ("calls",))


def test_measures_see_what_they_ask_for_whether_asynchronous_or_not() -> None:
    found = asyncio.run(scorer(length="words", right="is_right").measure(VIEW))
    assert found == {"length": 4.0, "right": 1.0}


def test_the_reward_is_the_weighted_sum_of_answer_counts_and_measures() -> None:
    rubric = scorer({"answer": 1.0, "calls": -0.1, "length": 0.01, "turns": 0.5}, length="words")
    assert rubric.reward(1.0, {"calls": 2.0, "length": 4.0, "turns": 2.0}) == pytest.approx(1 - 0.2 + 0.04 + 1.0)
    assert rubric.needs_demonstrations


def test_a_measure_without_weight_is_recorded_and_not_rewarded() -> None:
    rubric = scorer(length="words")
    assert rubric.reward(0.5, {"length": 4.0}) == 0.5
    assert not rubric.needs_demonstrations


@pytest.mark.parametrize(("function", "error"), [("breaks", ValueError), ("says_nothing", TypeError)])
def test_a_measure_that_fails_is_no_silent_zero(function: str, error: type[Exception]) -> None:
    with pytest.raises(error):
        asyncio.run(scorer(bad=function).measure(VIEW))


@pytest.mark.parametrize(
    ("weights", "measures", "message"),
    [
        ({"lenght": 1.0}, {"length": "words"}, "nothing measures lenght; there are answer, calls, length, turns"),
        (None, {"calls": "words"}, "counts calls already"),
        (None, {"parsed": "wants_a_parser"}, "asks for parser; a measure may take prompt, completion, answer"),
        (None, {"gone": "not_there"}, "cannot be imported"),
    ],
)
def test_what_cannot_be_measured_is_refused_at_load(
    weights: dict[str, float] | None, measures: dict[str, str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        scorer(weights, **measures)

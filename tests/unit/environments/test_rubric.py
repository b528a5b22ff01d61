"""The rubric of an episode: named measures, and the reward that their weights make."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from pydantic import ValidationError
from support.patience import wait_until
from synthetic import episode_measures
from synthetic.endpoint import CHAT, Endpoint, completion

from luffy.config.environment import EpisodeScoring, JudgeMeasure
from luffy.config.grading import JudgeGrader
from luffy.environments.limits import LateCall
from luffy.environments.live_episode import FailedEpisode, called
from luffy.environments.relative import shortest_correct
from luffy.environments.rubric import EpisodeScorer, EpisodeView, NoVerdict
from luffy.errors import ConfigError, LostError
from luffy.grading.judge import Judges
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
    found = asyncio.run(scorer(length="words", right="is_right", turns_by_level="as_in_verifiers").measure(VIEW))
    assert found == {"length": 4.0, "right": 1.0, "turns_by_level": 3.0}


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


@pytest.fixture
def released() -> Iterator[None]:
    """Lets measures that hang end after the test."""
    yield
    episode_measures.EVENT.set()
    wait_until(lambda: not any(thread.name == "limited call" for thread in threading.enumerate()))
    episode_measures.EVENT.clear()


@pytest.mark.parametrize("function", ["hangs", "never_comes"])
def test_a_measure_that_hangs_fails_after_its_time_limit(function: str, released: None) -> None:
    rubric = EpisodeScorer(
        EpisodeScoring(measures={"bad": f"synthetic.episode_measures:{function}"}, timeout_s=0.05), ()
    )
    with pytest.raises(LateCall, match=r"measure bad did not end within 0\.05 s"):
        asyncio.run(rubric.measure(VIEW))


def test_no_more_than_sixteen_measures_run_at_once() -> None:
    rubric = EpisodeScorer(EpisodeScoring(measures={"met": "synthetic.episode_measures:meets_fifteen_others"}), ())

    async def measure_all() -> list[dict[str, float]]:
        return await asyncio.gather(*(rubric.measure(VIEW) for _ in range(32)))

    assert asyncio.run(measure_all()) == [{"met": 16.0}] * 32


@pytest.mark.parametrize(
    ("weights", "measures", "message"),
    [
        (
            {"lenght": 1.0},
            {"length": "words"},
            "nothing measures lenght; there are answer, calls, length, tokens",
        ),
        (None, {"calls": "words"}, "counts calls already"),
        (None, {"parsed": "wants_a_parser"}, "asks for parser; a measure may take prompt, completion, answer"),
        (None, {"gone": "not_there"}, "cannot be imported"),
    ],
)
def test_what_cannot_be_measured_is_refused_at_load(weights, measures, message):
    with pytest.raises(ConfigError, match=message):
        scorer(weights, **measures)


def test_a_group_measure_is_refused_where_it_asks_for_what_an_episode_has() -> None:
    scoring = EpisodeScoring(group_measures={"length": "synthetic.episode_measures:words"})
    with pytest.raises(ConfigError, match="asks for completion; a measure may take prompt, completions, answer"):
        EpisodeScorer(scoring, ())


def test_the_shortest_correct_episodes_of_a_group() -> None:
    said = [[{"role": "assistant", "content": text}, {"role": "user", "content": "x" * 9}] for text in ("ab", "a", "b")]
    assert shortest_correct(said, [True, False, True]) == [0.0, 0.0, 1.0]
    assert shortest_correct(said, [False, True, True]) == [0.0, 1.0, 1.0]
    assert shortest_correct(said, [False] * 3) == [0.0] * 3


def judged(url: str, **settings: object) -> JudgeMeasure:
    judge = JudgeGrader(url=url, model="j", retries=0)
    return JudgeMeasure(kind="judge", rubric="Is it polite?", judge=judge, **settings)


def test_a_judge_is_read_again_as_a_stage_writes_it():
    measure = judged("http://h/v1")
    assert JudgeMeasure.model_validate_json(measure.model_dump_json()) == measure


def judge_says(text: str, tmp_path: Path, **settings: object) -> tuple[dict[str, float], str]:
    """The measures of VIEW by a judge that says the text, and what the judge was asked; it is gone without a text."""
    endpoint = Endpoint(lambda path, body: completion(text), (CHAT,))
    with closing(endpoint), closing(Judges(tmp_path)) as judges:
        url = f"{endpoint.url}/v1" if text else "http://127.0.0.1:9/v1"
        scorer = EpisodeScorer(EpisodeScoring(measures={"polite": judged(url, **settings)}), (), judges=judges)
        found = asyncio.run(called(scorer.measure(VIEW)))
        assert asyncio.run(scorer.measure(VIEW)) == found
    ((_, body),) = endpoint.asked  # the second time, the verdict was remembered
    return found, body["messages"][0]["content"]


def test_a_judge_measures_an_episode_by_a_rubric(tmp_path: Path) -> None:
    found, asked = judge_says("Well. VERDICT: MET", tmp_path)
    assert found == {"polite": 1.0}
    assert "[Rubric]\nIs it polite?" in asked and "assistant: 3 + 4\n\nuser: 7\n\nassistant: 7" in asked
    found, asked = judge_says("Well. VERDICT: UNMET", tmp_path, shows="reply")
    assert found == {"polite": 0.0}
    assert "[Response]\n7\n" in asked


def test_a_judge_without_a_verdict_is_no_silent_zero_and_one_that_is_gone_no_failure_of_the_episode(tmp_path):
    with pytest.raises(FailedEpisode) as failed:
        judge_says("I cannot say.", tmp_path)
    assert isinstance(failed.value.__cause__, NoVerdict)
    assert str(failed.value.__cause__).startswith("measure polite: judge: the reply holds no verdict")
    with pytest.raises(LostError, match=r"measure polite: judge: http://127\.0\.0\.1:9/v1: no answer"):
        judge_says("", tmp_path)


def test_the_rubric_makes_the_judges_prompt() -> None:
    with pytest.raises(ValidationError, match="prompt has no effect here"):
        judge = {"url": "http://h", "model": "j", "prompt": "{reference} {answer}"}
        JudgeMeasure.model_validate({"kind": "judge", "rubric": "x", "judge": judge})

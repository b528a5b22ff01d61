"""Episodes with a model behind OpenAI's chat protocol, over HTTP: the rules of episodes without token ids."""

from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

import pytest
from synthetic.endpoint import CHAT, Endpoint, Reply, completion, mortal, refusal

from luffy.config.environment import EnvironmentConfig, EpisodeLimits, GuessNumberEnvironment, ToolsEnvironment
from luffy.config.execution import ServerConfig
from luffy.config.model import EndpointModel
from luffy.environments.live_episode import EpisodeStart, TextEpisode
from luffy.environments.registry import open_text_player
from luffy.errors import ClusterError
from luffy.grading.judge import Judges
from luffy.grading.request import Problem
from luffy.rollout.engine import SamplingParams
from luffy.rollout.text_endpoint import TextEndpoint
from luffy.stages.answers.paid import PaidEndpoint
from luffy.stages.answers.store import AnswerStore
from luffy.types import FinishReason, Message

Play = Callable[..., tuple[list[TextEpisode], list[tuple[str, dict]]]]
PROMPT = (Message("system", "Play."), Message("user", "Guess a number from 1 to 7."))
TOKENS = 7
"""Of every reply, as `completion` counts them."""


def halving(path: str, body: dict) -> Reply:
    """Binary search from 1 to 7, with some reasoning before each guess."""
    low, high = 1, 7
    for guess, answer in zip(body["messages"][2::2], body["messages"][3::2], strict=True):
        number = int(guess["content"])
        low, high = (number + 1, high) if answer["content"] == "higher" else (low, number - 1)
    return completion(f"<think>between {low} and {high}</think>{(low + high) // 2}")


@pytest.fixture
def play(tmp_path: Path, serve: Callable[..., Endpoint]) -> Play:
    def run(
        answer: Callable[[str, dict], Reply],
        starts: Sequence[EpisodeStart],
        max_tokens: int = 64,
        environment: EnvironmentConfig | None = None,
        **limits: int,
    ) -> tuple[list[TextEpisode], list[tuple[str, dict]]]:
        served = serve(answer, (CHAT,))
        config = ServerConfig(urls=(served.url,), max_retries=0)
        endpoint = TextEndpoint.connect(EndpointModel(name="gpt-x"), config, ("/chat/completions",))
        paid = PaidEndpoint(endpoint, AnswerStore(tmp_path / "paid_answers.jsonl"))
        guessing = GuessNumberEnvironment(kind="guess_number", limits=EpisodeLimits(**limits))
        player = open_text_player(environment or guessing, Judges(None))
        with closing(endpoint):
            return player.play(starts, paid, SamplingParams(1.0, max_tokens, ())), served.asked

    return run


def game(number: int, seed: int = 3) -> EpisodeStart:
    return EpisodeStart(Problem(extra_info={"number": number}), str(number), PROMPT, (), seed)


def test_a_game_is_played_in_text_and_measured(play: Play) -> None:
    (found, quick), asked = play(halving, [game(7), game(4)])
    assert found.finish_reason is FinishReason.STOP
    assert found.measures == {"found": 1.0, "guesses": 3.0, "turns_without_guess": 0.0, "turns": 3.0}
    assert found.num_tokens == 3 * TOKENS
    assert [turn.content for turn in found.completion[1::2]] == ["higher", "higher"]
    assert quick.measures["turns"] == 1.0
    longest = max((body["messages"] for _, body in asked), key=len)
    assert [turn["role"] for turn in longest] == ["system", "user", "assistant", "user", "assistant", "user"]
    assert longest[2]["content"] == "4"  # earlier turns go without their reasoning


@pytest.mark.parametrize(
    ("limits", "max_tokens", "reason", "num_turns"),
    [
        ({}, 64, FinishReason.STOP, 3),
        ({"max_turns": 2}, 64, FinishReason.TURNS, 2),
        ({}, 2 * TOKENS, FinishReason.LENGTH, 2),
    ],
)
def test_bounds_end_an_episode_with_their_reason_and_turns_have_seeds_of_their_own(
    play, limits, max_tokens, reason, num_turns
):
    (episode,), asked = play(halving, [game(7)], max_tokens, **limits)
    assert episode.finish_reason is reason
    assert episode.measures["turns"] == num_turns
    assert episode.completion[-1].role == "assistant"
    seeds = [body["seed"] for _, body in asked]
    assert seeds[0] == 3 and len({*seeds}) == num_turns


@pytest.mark.parametrize(
    ("limits", "reason"), [({"max_turn_tokens": 5}, FinishReason.TURN_LENGTH), ({}, FinishReason.LENGTH)]
)
def test_a_cut_turn_gets_no_answer(play: Play, limits: dict[str, int], reason: FinishReason) -> None:
    (episode,), asked = play(lambda path, body: completion("4", "length"), [game(4)], 30, **limits)
    assert episode.finish_reason is reason
    assert asked[0][1]["max_tokens"] == limits.get("max_turn_tokens", 30)
    assert episode.measures["found"] == 0.0


def test_a_long_observation_is_cut_by_characters(play: Play) -> None:
    (episode,), _ = play(lambda path, body: completion("four?"), [game(4)], max_turns=2, max_observation_tokens=3)
    assert episode.completion[1].content == "Please ... [16 characters left out] ... umber."


def test_a_lost_endpoint_ends_the_play_and_paid_turns_are_not_asked_again(play: Play) -> None:
    with pytest.raises(ClusterError, match="gone"):
        play(mortal(3, halving, refusal(503, "gone")), [game(7, seed) for seed in (1, 2)])
    episodes, asked = play(halving, [game(7, seed) for seed in (1, 2)])
    assert [episode.measures["found"] for episode in episodes] == [1.0, 1.0]
    assert len(asked) == 6 - 3


def test_tools_are_called_in_the_environments_own_format(play: Play) -> None:
    def calling(path: str, body: dict) -> Reply:
        said = body["messages"][-1]["content"]
        call = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "17*23"}}\n</tool_call>'
        return completion(f"\\boxed{{{said.split()[1]}}}" if "tool_response" in said else call)

    tools = ToolsEnvironment(kind="tools", tools=("calculator",))
    (episode,), _ = play(calling, [game(1)], environment=tools)
    assert episode.completion[-1].content == "\\boxed{391}"
    assert episode.measures["tool_calls/calculator"] == 1.0

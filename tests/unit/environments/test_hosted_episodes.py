"""Episodes that others play a part in: a model behind OpenAI's chat protocol, and an environment of verifiers.

A small package takes the place of verifiers.
"""

import asyncio
import sys
from contextlib import closing
from pathlib import Path

import pytest
from support.refusals import refused
from synthetic.endpoint import CHAT, completion, mortal, refusal

from luffy.config.data import VerifiersSource
from luffy.config.environment import EpisodeLimits, GuessNumberEnvironment, ToolsEnvironment, VerifiersEnvironment
from luffy.config.execution import ServerConfig
from luffy.config.grading import MeasureGrader
from luffy.config.model import EndpointModel
from luffy.config.strict import FOR_IDENTITY
from luffy.data.conversations import ConversationEncoder
from luffy.data.sources import open_source
from luffy.data.templates import encode_traces, stop_token_ids
from luffy.data.tokenizer import build_tokenizer
from luffy.environments.episodes import EpisodePlayer
from luffy.environments.live_episode import EpisodeStart
from luffy.environments.registry import (
    instructions_of,
    open_environment,
    open_scored,
    open_text_player,
)
from luffy.errors import ClusterError
from luffy.grading.judge import Judges
from luffy.grading.kinds import steps
from luffy.grading.request import GradeRequest, Problem, problem_of
from luffy.hosted.verifiers_process import shared_process
from luffy.rollout.engine import Completion, SamplingParams
from luffy.rollout.text_endpoint import TextEndpoint
from luffy.stages.answers.paid import PaidEndpoint
from luffy.stages.answers.store import AnswerStore
from luffy.types import FinishReason, Message, Outcome

# ---- in text, over HTTP: the rules of episodes without token ids ----

PROMPT = (Message("system", "Play."), Message("user", "Guess a number from 1 to 7."))
TOKENS = 7
"""Of every reply, as `completion` counts them."""


def halving(path, body):
    """Binary search from 1 to 7, with some reasoning before each guess."""
    low, high = 1, 7
    for guess, answer in zip(body["messages"][2::2], body["messages"][3::2], strict=True):
        number = int(guess["content"])
        low, high = (number + 1, high) if answer["content"] == "higher" else (low, number - 1)
    return completion(f"<think>between {low} and {high}</think>{(low + high) // 2}")


@pytest.fixture
def play(tmp_path, serve):
    """The episodes with an endpoint that answers so, and what that was asked."""

    def run(answer, starts, max_tokens=64, environment=None, **limits):
        served = serve(answer, (CHAT,))
        config = ServerConfig(urls=(served.url,), max_retries=0)
        endpoint = TextEndpoint.connect(EndpointModel(name="gpt-x"), config, ("/chat/completions",))
        paid = PaidEndpoint(endpoint, AnswerStore(tmp_path / "paid_answers.jsonl"))
        guessing = GuessNumberEnvironment(kind="guess_number", limits=EpisodeLimits(**limits))
        player = open_text_player(environment or guessing, Judges(None))
        with closing(endpoint):
            return player.play(starts, paid, SamplingParams(1.0, max_tokens, ())), served.asked

    return run


def game(number, seed=3):
    return EpisodeStart(Problem(extra_info={"number": number}), str(number), PROMPT, (), seed)


def test_a_game_is_played_in_text_and_measured_and_a_long_observation_is_cut_by_characters(play):
    (found, quick), asked = play(halving, [game(7), game(4)])
    assert found.finish_reason is FinishReason.STOP
    assert found.measures == {"found": 1.0, "guesses": 3.0, "turns_without_guess": 0.0, "turns": 3.0}
    assert found.num_tokens == 3 * TOKENS
    assert [turn.content for turn in found.completion[1::2]] == ["higher", "higher"]
    assert quick.measures["turns"] == 1.0
    longest = max((body["messages"] for _, body in asked), key=len)
    assert [turn["role"] for turn in longest] == ["system", "user", "assistant", "user", "assistant", "user"]
    assert longest[2]["content"] == "4"  # earlier turns go without their reasoning
    (episode,), _ = play(lambda path, body: completion("five?"), [game(4, 5)], max_turns=2, max_observation_tokens=3)
    assert episode.completion[1].content == "Please ... [16 characters left out] ... umber."


def cut_off(path, body):
    return completion("4", "length")


@pytest.mark.parametrize(
    ("answer", "limits", "max_tokens", "reason", "num_turns", "asked_for"),
    [
        (halving, {}, 64, FinishReason.STOP, 3, 64),
        (halving, {"max_turns": 2}, 64, FinishReason.TURNS, 2, 64),
        (halving, {}, 2 * TOKENS, FinishReason.LENGTH, 2, 2 * TOKENS),
        # A turn that was cut gets no answer.
        (cut_off, {"max_turn_tokens": 5}, 30, FinishReason.TURN_LENGTH, 1, 5),
        (cut_off, {}, 30, FinishReason.LENGTH, 1, 30),
    ],
)
def test_bounds_end_an_episode_with_their_reason_and_turns_have_seeds_of_their_own(
    play, answer, limits, max_tokens, reason, num_turns, asked_for
):
    (episode,), asked = play(answer, [game(7 if answer is halving else 4)], max_tokens, **limits)
    assert (episode.finish_reason, episode.measures["turns"]) == (reason, num_turns)
    assert episode.completion[-1].role == "assistant"
    assert (asked[0][1]["max_tokens"], episode.measures["found"]) == (asked_for, float(reason is FinishReason.STOP))
    seeds = [body["seed"] for _, body in asked]
    assert seeds[0] == 3 and len({*seeds}) == num_turns


def test_a_lost_endpoint_ends_the_play_and_paid_turns_are_not_asked_again(play):
    with pytest.raises(ClusterError, match="gone"):
        play(mortal(3, halving, refusal(503, "gone")), [game(7, seed) for seed in (1, 2)])
    episodes, asked = play(halving, [game(7, seed) for seed in (1, 2)])
    assert [episode.measures["found"] for episode in episodes] == [1.0, 1.0]
    assert len(asked) == 6 - 3


def test_tools_are_called_in_the_environments_own_format(play):
    def calling(path, body):
        said = body["messages"][-1]["content"]
        call = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "17*23"}}\n</tool_call>'
        return completion(f"\\boxed{{{said.split()[1]}}}" if "tool_response" in said else call)

    tools = ToolsEnvironment(kind="tools", tools=("calculator",))
    (episode,), _ = play(calling, [game(1)], environment=tools)
    assert episode.completion[-1].content == "\\boxed{391}"
    assert episode.measures["tool_calls/calculator"] == 1.0


# ---- with an environment of verifiers, from tasks to grades ----

FAKES = Path(__file__).parents[2] / "synthetic" / "fake_verifiers"
CALL = '<tool_call>\n{"name": "square", "arguments": {"x": 7}}\n</tool_call>'


@pytest.fixture(autouse=True)
def fake_package(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(FAKES))
    monkeypatch.setattr("luffy.hosted.verifiers_process._shared", shared := {})
    yield
    for process in shared.values():
        process.close()


def package(which):
    return {"environment": "fake-environments", "arguments": {"which": which}, "python": sys.executable}


def configured(which, **settings):
    return VerifiersEnvironment(kind="verifiers", **package(which), **settings)


def prompts(which, **settings):
    return list(open_source(VerifiersSource(kind="verifiers", **package(which), **settings), "train", 0).rows())


def played(which, turns):
    """Scores and answers of an episode of the environment's first task."""
    (prompt, *_) = prompts(which)
    environment = open_environment(configured(which))()

    async def play():
        conversation = [*prompt.messages, *await environment.reset(problem_of(prompt))]
        answers = []
        for turn in turns:
            conversation.append(Message("assistant", turn))
            answers.append(await environment.respond(tuple(conversation)))
            conversation += answers[-1] or ()
        await environment.score(tuple(conversation))
        await environment.close()
        return answers

    answers = asyncio.run(play())
    return dict(environment.counts()), answers


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
    scores, answers = played("tools", [CALL, "<tool_call>\n{oops}\n</tool_call>", "49"])
    assert answers[0] == [Message("user", "<tool_response>\n49\n</tool_response>")]
    assert "Expecting value" in answers[1][0].content
    assert answers[2] is None
    assert scores == {"reward": 1.0, "is_right": 1.0, "num_calls": 2.0}
    assert played("sums", ["2"]) == ({"reward": 1.1, "is_right": 1.0, "length": 1.0}, [None])


class Written:
    """A policy that writes one token more of `text` per call, up to the limit of a turn."""

    def __init__(self, ids):
        self._ids = tuple(ids)

    def generate(self, requests, params):
        ids = self._ids[: requests[0].max_new_tokens]
        reason = FinishReason.STOP if len(ids) == len(self._ids) else FinishReason.LENGTH
        return [Completion(ids, (0.0,) * len(ids), reason, (0,) * len(ids)) for _ in requests]

    def close(self): ...


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


@pytest.mark.parametrize(
    ("grader", "measures", "outcome", "reward"),
    [
        (MeasureGrader(), {"reward": 1.0}, Outcome.CORRECT, 1.0),
        (MeasureGrader(), {"reward": 0.75}, Outcome.WRONG, 0.75),
        (MeasureGrader(), {}, Outcome.CRASHED, 0.0),
        (MeasureGrader(name="found", correct_from=0.5), {"found": 0.5}, Outcome.CORRECT, 0.5),
    ],
)
def test_the_environments_reward_is_the_grade(grader, measures, outcome, reward):
    (grade,) = steps(grader, GradeRequest("text", "gold", measures=measures))
    assert (grade.outcome, grade.reward) == (outcome, reward)

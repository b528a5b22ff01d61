"""Episodes with an environment of verifiers, from tasks to grades; a small package takes the place of verifiers."""

import asyncio
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from luffy.config.data import VerifiersSource
from luffy.config.environment import EpisodeLimits, VerifiersEnvironment
from luffy.config.grading import MeasureGrader
from luffy.config.strict import FOR_IDENTITY
from luffy.data.conversations import ConversationEncoder
from luffy.data.sources import open_source
from luffy.data.templates import encode_traces, stop_token_ids
from luffy.data.tokenizer import build_tokenizer
from luffy.environments.call_formats import ToolCall, XmlCalls
from luffy.environments.episodes import Episode, EpisodePlayer
from luffy.environments.live_episode import EpisodeStart
from luffy.environments.registry import hosted_tools, instructions_of, open_environment, open_scored
from luffy.errors import ConfigError, DataError
from luffy.grading.kinds import steps
from luffy.grading.request import GradeRequest, Problem, problem_of
from luffy.hosted.verifiers_process import HostedDescription, shared_process
from luffy.rollout.engine import Completion, RolloutRequest, SamplingParams
from luffy.types import FinishReason, Message, Outcome, Prompt

FAKES = Path(__file__).parents[2] / "synthetic" / "fake_verifiers"
CALL = '<tool_call>\n{"name": "square", "arguments": {"x": 7}}\n</tool_call>'


@pytest.fixture(autouse=True)
def fake_package(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("PYTHONPATH", str(FAKES))
    monkeypatch.setattr("luffy.hosted.verifiers_process._shared", shared := {})
    yield
    for process in shared.values():
        process.close()


def package(which: str) -> dict[str, object]:
    return {"environment": "fake-environments", "arguments": {"which": which}, "python": sys.executable}


def configured(which: str, **settings: object) -> VerifiersEnvironment:
    return VerifiersEnvironment(kind="verifiers", **package(which), **settings)


def prompts(which: str, **settings: object) -> list[Prompt]:
    return list(open_source(VerifiersSource(kind="verifiers", **package(which), **settings), "train", 0).rows())


def played(which: str, turns: Sequence[str]) -> tuple[dict[str, float], list[Sequence[Message] | None]]:
    """Scores and answers of an episode of the environment's first task."""
    (prompt, *_) = prompts(which)
    environment = open_environment(configured(which))()

    async def play() -> list[Sequence[Message] | None]:
        conversation = [*prompt.messages, *await environment.reset(problem_of(prompt))]
        answers: list[Sequence[Message] | None] = []
        for turn in turns:
            conversation.append(Message("assistant", turn))
            answers.append(await environment.respond(tuple(conversation)))
            conversation += answers[-1] or ()
        await environment.score(tuple(conversation))
        await environment.close()
        return answers

    answers = asyncio.run(play())
    return dict(environment.counts()), answers


def test_a_source_has_the_environments_tasks() -> None:
    first, second = prompts("sums")
    assert first.messages == (Message("user", "1 + 1 ="),)
    assert (first.ground_truth, first.grader, first.data_source) == ("2", "environment", "verifiers/fake-environments")
    assert second.extra_info["info"] == {"level": 2}
    assert second.extra_info["verifiers_task"]["row"] == 1
    assert first.uid != second.uid
    assert prompts("sums", num_prompts=1) == [first]
    assert [prompt.ground_truth for prompt in prompts("game", split="eval")] == ["1"]


def test_a_source_without_the_split_says_which_there_are() -> None:
    with pytest.raises(DataError, match=r"data\.train\.split: .* has no tasks in eval; there are train \(2\)"):
        prompts("sums", split="eval")


def test_the_prompts_and_the_environment_share_one_process() -> None:
    prompts("sums")
    environment = configured("sums", limits={"max_turns": 3})
    assert shared_process(environment).pid == shared_process(VerifiersSource(kind="verifiers", **package("sums"))).pid


def test_scores_are_counts_by_name() -> None:
    assert played("sums", ["2"]) == ({"reward": 1.1, "is_right": 1.0, "length": 1.0}, [None])


def test_tools_are_described_called_and_answered_in_the_policys_format() -> None:
    assert '"name": "square"' in instructions_of(configured("tools"))
    assert instructions_of(configured("tools", describe=False)) == ""
    assert instructions_of(configured("sums")) == ""
    scores, answers = played("tools", [CALL, "<tool_call>\n{oops}\n</tool_call>", "49"])
    assert answers[0] == [Message("user", "<tool_response>\n49\n</tool_response>")]
    assert "Expecting value" in answers[1][0].content
    assert answers[2] is None
    assert scores == {"reward": 1.0, "is_right": 1.0, "num_calls": 2.0}


def test_a_parameter_may_list_its_types() -> None:
    parameters = {"properties": {"query": {"type": ["string", "null"]}}}
    search = {"type": "function", "function": {"name": "search", "parameters": parameters}}
    tools = hosted_tools(HostedDescription("0.4.0", "Env", [search], [], {}), "xml")
    assert XmlCalls().parse("<search><query>cities</query></search>", tools) == [
        ToolCall("search", {"query": "cities"})
    ]


def test_a_prompt_of_another_source_is_refused() -> None:
    environment = open_environment(configured("sums"))()
    with pytest.raises(DataError, match=r"has no extra_info\.verifiers_task"):
        asyncio.run(environment.reset(Problem(data_source="gsm8k")))


def test_weights_may_name_the_environments_functions_and_demonstrations_are_played_to_be_rewarded() -> None:
    assert open_scored(configured("sums"))[1].needs_demonstrations
    open_scored(configured("sums", scoring={"weights": {"reward": 1.0, "length": -0.01}}))
    with pytest.raises(ConfigError, match="nothing measures lenght"):
        open_scored(configured("sums", scoring={"weights": {"lenght": 1.0}}))


class Written:
    """A policy that writes one token more of `text` per call, up to the limit of a turn."""

    def __init__(self, ids: Sequence[int]) -> None:
        self._ids = tuple(ids)

    def generate(self, requests: Sequence[RolloutRequest], params: SamplingParams) -> list[Completion]:
        ids = self._ids[: requests[0].max_new_tokens]
        reason = FinishReason.STOP if len(ids) == len(self._ids) else FinishReason.LENGTH
        return [Completion(ids, (0.0,) * len(ids), reason, (0,) * len(ids)) for _ in requests]

    def close(self) -> None: ...


def whole_episode(which: str, text: str, **limits: int) -> Episode:
    tokenizer = build_tokenizer(["Count. Begin. 3 left wait die hang on"] * 4)
    (prompt, *_) = prompts(which)
    make, scorer = open_scored(configured(which))
    player = EpisodePlayer(make, ConversationEncoder(tokenizer), EpisodeLimits(**limits), scorer)
    start = EpisodeStart(problem_of(prompt), prompt.ground_truth, prompt.messages, (1,), seed=0)
    params = SamplingParams(1.0, 400, stop_token_ids(tokenizer))
    return player.play([start], Written(encode_traces(tokenizer, [text])[0]), params)[0]


@pytest.mark.parametrize(
    ("limits", "reason", "turns"),
    [
        ({}, FinishReason.STOP, 3.0),
        ({"max_turns": 2}, FinishReason.TURNS, 2.0),
        ({"max_turn_tokens": 1}, FinishReason.TURN_LENGTH, 1.0),
    ],
)
def test_an_episode_is_scored_whatever_ended_it(limits: dict[str, int], reason: FinishReason, turns: float) -> None:
    """The reward of this game is the number of the policy's turns, a turn that was cut included."""
    episode = whole_episode("game", "3 left", **limits)
    assert episode.finish_reason is reason
    assert episode.measures["reward"] == episode.measures["turns"] == turns


def test_a_failing_reward_function_ends_its_episode_as_failed() -> None:
    episode = whole_episode("raises", "3")
    assert episode.finish_reason is FinishReason.ENVIRONMENT_ERROR and episode.fault


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


def test_where_the_package_is_installed_is_no_part_of_the_identity() -> None:
    here, there = configured("sums"), configured("sums").model_copy(update={"python": "/elsewhere/python"})
    assert here.model_dump_json(context=FOR_IDENTITY) == there.model_dump_json(context=FOR_IDENTITY)
    assert here.model_dump_json() != there.model_dump_json()

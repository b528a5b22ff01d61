"""From configuration to environments, mixtures and players: what is checked when a run starts, and which part plays."""

import asyncio
import json
from dataclasses import replace

import pytest
from pydantic import ValidationError

from luffy.config.environment import CustomEnvironment, EpisodeLimits, History, MixtureEnvironment, ToolsEnvironment
from luffy.data.conversations import ConversationEncoder
from luffy.data.row_filters import with_instructions
from luffy.data.tokenizer import build_tokenizer
from luffy.environments.environment import ScoringEnvironment
from luffy.environments.limits import LateCall
from luffy.environments.registry import (
    MixedEpisode,
    check_template,
    instructions_by_source,
    instructions_of,
    open_environment,
    open_scored,
)
from luffy.errors import ConfigError, DataError
from luffy.grading.request import Problem
from luffy.types import Message, Prompt

MODULE = """
import asyncio

from luffy.types import Message

class CountTo:
    def __init__(self, limit: int) -> None:
        self.limit = self.left = limit

    async def reset(self, problem):
        return ()

    async def respond(self, conversation):
        self.left -= 1
        return [Message("user", f"{self.left} turns left")] if self.left else None

    def counts(self):
        return {"turns_taken": float(self.limit - self.left)}

    async def close(self):
        pass

class Synchronous(CountTo):
    def respond(self, conversation):
        return None

class Nothing:
    pass

class AwaitedCounts(CountTo):
    async def counts(self):
        return {}

class Fails(CountTo):
    def __init__(self, limit):
        raise OSError(f"no {limit}")

class FailsToCount(CountTo):
    def counts(self):
        return None

class Slow(CountTo):
    async def respond(self, conversation):
        await asyncio.Event().wait()

class GivesUp(CountTo):
    async def respond(self, conversation):
        raise TimeoutError("the service is slow today")

class Scores(Slow):
    async def score(self, conversation):
        await asyncio.Event().wait()

def function(limit):
    return CountTo(limit)
"""


@pytest.fixture(autouse=True)
def module(tmp_path, monkeypatch):
    (tmp_path / "custom_environments_of_a_test.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)


def custom(name, **options):
    return CustomEnvironment(
        kind="custom", factory=f"custom_environments_of_a_test:{name}", options=options, instructions="Count."
    )


def test_a_class_of_ones_own_is_made_for_every_episode_with_its_options():
    make = open_environment(custom("CountTo", limit=2))
    first, second = make(), make()

    async def play():
        await first.reset(Problem())
        answers = [await first.respond([Message("assistant", "a")]) for _ in range(2)]
        await first.close()
        return answers

    assert asyncio.run(play()) == [[Message("user", "1 turns left")], None]
    assert first.counts() == {"turns_taken": 2.0} and second.counts() == {"turns_taken": 0.0}
    assert instructions_of(custom("CountTo", limit=2)) == "Count."


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("Missing", {}, "cannot be imported"),
        ("function", {"limit": 2}, "is a function; it has to be a class"),
        ("Nothing", {}, "needs `async def reset`"),
        ("Synchronous", {"limit": 2}, "needs `async def respond`"),
        ("AwaitedCounts", {"limit": 2}, "needs `def counts`"),
        ("Fails", {"limit": 2}, "fails before the first episode: OSError: no 2"),
        ("FailsToCount", {"limit": 2}, "fails before the first episode: TypeError"),
        ("CountTo", {}, "does not take environment.options: missing a required argument: 'limit'"),
        ("CountTo", {"limits": 3}, "does not take environment.options: missing a required argument"),
    ],
)
def test_a_class_that_is_no_environment_is_refused_in_one_line(name, options, words):
    with pytest.raises(ConfigError) as caught:
        open_environment(custom(name, **options))
    assert str(caught.value).startswith("environment.factory: custom_environments_of_a_test:")
    assert words in str(caught.value) and "\n" not in str(caught.value)


def limited(name):
    return open_environment(custom(name, limit=2).model_copy(update={"timeout_s": 0.05}))()


def test_a_method_that_hangs_ends_after_its_time_limit():
    scoring = limited("Scores")
    assert isinstance(scoring, ScoringEnvironment) and not isinstance(limited("Slow"), ScoringEnvironment)
    for awaited, method in ((limited("Slow").respond([]), "respond"), (scoring.score([]), "score")):
        with pytest.raises(LateCall, match=f"{method} did not end within 0.05 s .environment.timeout_s"):
            asyncio.run(awaited)
    with pytest.raises(TimeoutError, match="slow today"):
        asyncio.run(limited("GivesUp").respond([]))


def tools(*names, **settings):
    return ToolsEnvironment(kind="tools", tools=names, **settings)


def test_instructions_of_tools_are_those_of_the_format_unless_they_are_not_to_be_described():
    texts = {instructions_of(tools("calculator", calls=calls)) for calls in ("hermes", "llama3", "xml")}
    assert len(texts) == 3 and all("calculator" in text for text in texts)
    assert instructions_of(tools("calculator", describe=False)) == ""


def test_tools_are_checked_when_the_environment_is_opened():
    with pytest.raises(ConfigError, match="calls: xml cannot tell apart"):
        open_environment(tools("synthetic.sample_tools:text_or_number", calls="xml"))
    with pytest.raises(ConfigError, match="describes `numbre`"):
        instructions_of(tools("synthetic.sample_tools:with_stale_docs"))


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


CHAT = (
    "{% for m in messages %}TOOL{{ m.role }}\n{{ m.content }}<|eos|>{% endfor %}"
    "{% if add_generation_prompt %}assistant\n{% endif %}"
)
RAISES = "{% if m.role == 'tool' %}{{ raise_exception('unknown role') }}{% endif %}"
ALTERNATES = (
    "{% if m.role == 'tool' and messages[loop.index0 - 1].role != 'assistant' %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
)
DROPS = "{% if m.role == 'tool' %}{% continue %}{% endif %}"


def checked(calls: str, clause: str, history: History) -> None:
    tokenizer = build_tokenizer(["user assistant tool 0"] * 4)
    tokenizer.chat_template = CHAT.replace("TOOL", clause)
    limits = EpisodeLimits(history=history)
    config = ToolsEnvironment(kind="tools", tools=("calculator",), calls=calls, limits=limits)
    check_template(config, ConversationEncoder(tokenizer, history))


@pytest.mark.parametrize("history", ["exact", "as_sampled", "branching"])
@pytest.mark.parametrize(
    ("clause", "words"),
    [(RAISES, "unknown role"), (ALTERNATES, "roles must alternate"), (DROPS, "leaves out a message")],
)
def test_a_template_that_cannot_write_results_of_tools_is_refused(history: History, clause: str, words: str) -> None:
    with pytest.raises(DataError, match=f"results of tools are messages of the role tool: .*{words}") as caught:
        checked("llama3", clause, history)
    assert "\n" not in str(caught.value)
    checked("hermes", clause, history)  # whose results are messages of the user
    checked("llama3", "", history)

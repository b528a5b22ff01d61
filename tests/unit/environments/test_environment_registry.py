"""From configuration to environments: what is checked when a run starts."""

import asyncio

import pytest

from luffy.config.environment import CustomEnvironment, ToolsEnvironment
from luffy.environments.environment import ScoringEnvironment
from luffy.environments.limited_calls import LateCall
from luffy.environments.registry import instructions_of, open_environment
from luffy.errors import ConfigError
from luffy.grading.request import Problem
from luffy.types import Message

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


def test_instructions_of_tools_are_those_of_the_format():
    texts = {instructions_of(tools("calculator", calls=calls)) for calls in ("hermes", "llama3", "xml")}
    assert len(texts) == 3 and all("calculator" in text for text in texts)


def test_tools_need_not_be_described():
    assert instructions_of(tools("calculator", describe=False)) == ""


def test_tools_are_checked_when_the_environment_is_opened():
    with pytest.raises(ConfigError, match=r"environment\.tools: there is no built-in tool"):
        open_environment(tools("unknown"))
    with pytest.raises(ConfigError, match="calls: xml cannot tell apart"):
        open_environment(tools("synthetic.sample_tools:text_or_number", calls="xml"))
    with pytest.raises(ConfigError, match="describes `numbre`"):
        instructions_of(tools("synthetic.sample_tools:with_stale_docs"))

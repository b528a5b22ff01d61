"""From configuration to environments, mixtures and rubrics: what is refused at the start, what plays, what rewards."""

import asyncio
import json
import threading
from contextlib import closing
from dataclasses import replace

import pytest
from pydantic import ValidationError
from support.refusals import refused
from synthetic.endpoint import CHAT, Endpoint, completion

from luffy.config.environment import (
    CustomEnvironment,
    EpisodeLimits,
    EpisodeScoring,
    GuessNumberEnvironment,
    JudgeMeasure,
    MixtureEnvironment,
    ToolsEnvironment,
)
from luffy.config.grading import JudgeGrader
from luffy.data.conversations import ConversationEncoder
from luffy.data.row_filters import with_instructions
from luffy.data.tokenizer import build_tokenizer
from luffy.environments import after_thinking, xml_fields
from luffy.environments.environment import ScoringEnvironment
from luffy.environments.limits import LateCall
from luffy.environments.live_episode import FailedEpisode, called
from luffy.environments.registry import (
    check_template,
    instructions_by_source,
    instructions_of,
    open_environment,
    open_scored,
)
from luffy.environments.rubric import EpisodeScorer, EpisodeView, NoVerdict
from luffy.errors import DataError, LostError
from luffy.grading.judge import Judges
from luffy.grading.request import Problem
from luffy.types import Message, Prompt


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

    async def close(self): ...


def fails(self, limit):
    raise OSError(f"no {limit}")


async def waits(self, conversation):
    await asyncio.Event().wait()


async def gives_up(self, conversation):
    raise TimeoutError("the service is slow today")


Nothing = type("Nothing", (), {})
Synchronous = type("Synchronous", (CountTo,), {"respond": lambda self, conversation: None})
AwaitedCounts = type("AwaitedCounts", (CountTo,), {"counts": gives_up})
Fails = type("Fails", (CountTo,), {"__init__": fails})
FailsToCount = type("FailsToCount", (CountTo,), {"counts": lambda self: None})
Slow = type("Slow", (CountTo,), {"respond": waits})
GivesUp = type("GivesUp", (CountTo,), {"respond": gives_up})
Scores = type("Scores", (Slow,), {"score": waits})


def custom(name, **options):
    return CustomEnvironment(kind="custom", factory=f"{__name__}:{name}", options=options, instructions="Count.")


def played(environment, turns, problem=None):
    """Its answers to the turns, each the whole conversation."""

    async def play():
        assert await environment.reset(problem or Problem()) == ()
        answers = [await environment.respond([Message("user", "?"), Message("assistant", turn)]) for turn in turns]
        await environment.close()
        return [answer and answer[0].content for answer in answers]

    return asyncio.run(play())


def test_a_class_of_ones_own_is_made_for_every_episode_with_its_options_and_instructions_are_those_of_the_kind():
    make = open_environment(custom("CountTo", limit=2))
    first, second = make(), make()
    assert played(first, ["a", "b"]) == ["1 turns left", None]
    assert first.counts() == {"turns_taken": 2.0} and second.counts() == {"turns_taken": 0.0}
    assert instructions_of(custom("CountTo", limit=2)) == "Count."
    texts = {instructions_of(tools("calculator", calls=calls)) for calls in ("hermes", "llama3")}
    assert len(texts) == 2 and all("calculator" in text for text in texts)
    assert instructions_of(tools("calculator", describe=False)) == ""


def test_a_method_that_hangs_ends_after_its_time_limit():
    def limited(name):
        return open_environment(custom(name, limit=2).model_copy(update={"timeout_s": 0.05}))()

    scoring = limited("Scores")
    assert isinstance(scoring, ScoringEnvironment) and not isinstance(limited("Slow"), ScoringEnvironment)
    for awaited, method in ((limited("Slow").respond([]), "respond"), (scoring.score([]), "score")):
        with pytest.raises(LateCall, match=rf"{method} did not end within 0.05 s .environment\.timeout_s"):
            asyncio.run(awaited)
    with pytest.raises(TimeoutError, match="slow today"):
        asyncio.run(limited("GivesUp").respond([]))


def tools(*names, **settings):
    return ToolsEnvironment(kind="tools", tools=names, **settings)


TEMPLATE = (
    "{% for m in messages %}TOOL{{ m.role }}\n{{ m.content }}<|eos|>{% endfor %}"
    "{% if add_generation_prompt %}assistant\n{% endif %}"
)
UNFIT = {  # what a template does with a message of the role `tool`, by the words of its refusal
    "unknown role": "{{ raise_exception('unknown role') }}",
    "twice": "{% if messages[loop.index0 - 1].role != 'assistant' %}{{ raise_exception('twice') }}{% endif %}",
    "leaves out a message": "{% continue %}",
}


@pytest.mark.parametrize("history", ["exact", "as_sampled", "branching"])
@pytest.mark.parametrize(("words", "clause"), UNFIT.items(), ids=UNFIT)
def test_a_template_that_cannot_write_results_of_tools_is_refused(history, words, clause):
    def check(calls, clause):
        tokenizer = build_tokenizer(["user assistant tool 0"] * 4)
        tokenizer.chat_template = TEMPLATE.replace("TOOL", f"{{% if m.role == 'tool' %}}{clause}{{% endif %}}")
        config = tools("calculator", calls=calls, limits=EpisodeLimits(history=history))
        check_template(config, ConversationEncoder(tokenizer, history))

    with refused("results of tools are messages of the role tool: ", words):
        check("llama3", clause)
    check("hermes", clause)  # whose results are messages of the user
    check("llama3", "")


SUM = Prompt("p", "sums", (Message("user", "?"),), "")
POEM = replace(SUM, data_source="poems")
UNPLAYED = "no part plays the data source 'poems'; add it to the `plays` of one ("


def mixture(game=None, **scoring):
    parts = {
        "tools": {"environment": {"kind": "tools", "tools": ["calculator"]}, "plays": ["sums", "products"]},
        "game": game or {"environment": {"kind": "guess_number"}, "plays": ["games"]},
    }
    return MixtureEnvironment.model_validate_json(json.dumps({"kind": "mixture", "parts": parts, "scoring": scoring}))


def test_the_part_that_names_the_data_source_plays_counts_and_gives_the_instructions():
    game, products = open_environment(mixture())(), open_environment(mixture())()
    assert played(game, ["3"], Problem(data_source="games", extra_info={"number": 5})) == ["higher"]
    assert game.counts() == {
        "part/tools": 0.0, "part/game": 1.0,
        "game/guesses": 1.0, "game/turns_without_guess": 0.0, "game/found": 0.0,
    }  # fmt: skip
    assert played(products, [], Problem(data_source="products")) == []
    assert products.counts()["part/tools"] == 1.0
    prompts = with_instructions([SUM, replace(SUM, data_source="games")], instructions_by_source(mixture()))
    assert "calculator" in prompts[0].messages[0].content
    assert prompts[1].messages == SUM.messages
    with refused(UNPLAYED):
        played(open_environment(mixture())(), [], Problem(data_source="poems"))
    with refused(UNPLAYED):
        with_instructions([POEM], instructions_by_source(mixture()))
    # A count of one part weighs nothing in the other.
    _, scorer = open_scored(mixture(weights={"answer": 1.0, "tools/tool_errors": -0.1, "game/found": 0.5}))
    assert scorer.reward(1.0, {"game/found": 1.0}) == 1.5
    assert scorer.reward(1.0, {"tools/tool_errors": 2.0}) == pytest.approx(0.8)


def test_parts_that_cannot_be_told_apart_are_refused():
    for environment, plays, message in (
        ({"kind": "guess_number"}, ["sums"], "sums is played by tools already"),
        ({"kind": "guess_number", "limits": {"max_turns": 3}}, ["games"], "the mixture has one for all parts"),
        ({"kind": "mixture", "parts": {}}, ["games"], "mixture"),
    ):
        with pytest.raises(ValidationError, match=message):
            mixture({"environment": environment, "plays": plays})


SAID = "Please guess a whole number."


@pytest.mark.parametrize(
    ("number", "turns", "answers", "counts"),
    [
        (37, ["50", "I guess 25!", "37<|im_end|>"], ["lower", "higher", None], (3.0, 0.0, 1.0)),
        (3, ["no idea", "<think>perhaps 3", "3.5", "1" * 40, ""], [SAID] * 5, (0.0, 5.0, 0.0)),
        # The last whole number after the reasoning is the guess.
        (5, ["<think>It is 5.</think> 7", "between 1 and 4", "-5"], ["lower", "higher", "higher"], (3.0, 0.0, 0.0)),
        (5, ["3-4", "**5**"], ["higher", None], (2.0, 0.0, 1.0)),
        *((5, [turn], [None], (1.0, 0.0, 1.0)) for turn in ("\\boxed{5}", "<answer>5</answer>.", "My guess is 5.")),
    ],
)
def test_a_game_answers_and_counts_guesses_until_the_right_one(number, turns, answers, counts):
    make = open_environment(GuessNumberEnvironment(kind="guess_number"))
    assert played(game := make(), turns, Problem(extra_info={"number": number})) == answers
    assert game.counts() == dict(zip(("guesses", "turns_without_guess", "found"), counts, strict=True))
    for info in ({}, {"number": "5"}, {"number": True}):
        with refused("quiz: guess_number needs a whole number as extra_info.number", error=DataError):
            played(make(), [], Problem(data_source="quiz", extra_info=info))


def test_only_the_text_after_the_reasoning_is_left_and_fields_are_the_first_elements_of_their_names():
    for turn, reply in {
        "<think>a</think>b": "b", "a</think>b": "b", "<think>a</think>b<think>c</think>d": "d", "plain": "plain",
        "<think>never closed": "", "<think>a</think>b<think>again": "", "": "",
    }.items():  # fmt: skip
        assert after_thinking(turn) == reply
    text = "<reasoning>\nwhy\n</reasoning>\n<code>x = 1</code><code>second</code><empty></empty><open>"
    found = {"reasoning": "why", "code": "x = 1", "answer": None, "empty": "", "open": None}
    assert xml_fields(text, ["reasoning", ("code", "answer"), "empty", "open"]) == found


# Measures of episodes, as a user writes them.

EVENT = threading.Event()
"""Lets `hangs` end."""
MEETING, RUNNING = threading.Barrier(16), []


def words(completion):
    return len(" ".join(turn["content"] for turn in completion if turn["role"] == "assistant").split())


def as_in_verifiers(completion, **kwargs):
    return len(completion) * kwargs["info"]["level"]


async def is_right(completion, answer):
    return completion[-1]["content"] == answer


def breaks(counts):
    raise ValueError("no measure today")


def hangs(answer):
    EVENT.wait()


async def never_comes(answer):
    await asyncio.Event().wait()


def says_nothing(task):
    return None


def meets_fifteen_others(answer):
    """How many ran at the same time, once there are sixteen."""
    RUNNING.append(1)
    MEETING.wait()
    found = len(RUNNING)
    MEETING.wait()
    RUNNING.pop()
    MEETING.wait()
    return found


COMPLETION = (Message("assistant", "3 + 4"), Message("user", "7"), Message("assistant", "7"))
VIEW = EpisodeView((Message("user", "Begin."),), COMPLETION, "7", {"level": 1}, "sums", {"calls": 2.0})


def scorer(counts=("calls",), **scoring):
    measures = {name: f"{__name__}:{path}" for name, path in scoring.pop("measures", {}).items()}
    return EpisodeScorer(EpisodeScoring(measures=measures, **scoring), counts)


def test_measures_see_what_they_ask_for_and_those_with_weights_make_the_reward():
    asked = scorer(measures={"length": "words", "right": "is_right", "turns_by_level": "as_in_verifiers"})
    assert asyncio.run(asked.measure(VIEW)) == {"length": 4.0, "right": 1.0, "turns_by_level": 3.0}
    assert asked.reward(0.5, {"length": 4.0}) == 0.5 and not asked.needs_demonstrations
    weights = {"answer": 1.0, "calls": -0.1, "length": 0.01, "turns": 0.5}
    rubric = scorer(weights=weights, measures={"length": "words"})
    assert rubric.reward(1.0, {"calls": 2.0, "length": 4.0, "turns": 2.0}) == pytest.approx(1 - 0.2 + 0.04 + 1.0)
    assert rubric.needs_demonstrations
    with pytest.raises(KeyError, match="calls"):  # no silent zero
        rubric.reward(1.0, {"length": 4.0, "turns": 2.0})


def test_a_measure_that_fails_or_hangs_is_no_silent_zero_and_no_more_than_sixteen_run_at_once():
    EVENT.clear()
    late = (LateCall, r"measure bad did not end within 0\.05 s", {"timeout_s": 0.05})
    for function, (error, message, limit) in {
        "breaks": (ValueError, "no measure today", {}), "says_nothing": (TypeError, "measure bad is None", {}),
        "hangs": late, "never_comes": late,
    }.items():  # fmt: skip
        with pytest.raises(error, match=message):
            asyncio.run(scorer(measures={"bad": function}, **limit).measure(VIEW))
    EVENT.set()
    rubric = scorer((), measures={"met": "meets_fifteen_others"})

    async def measure_all():
        return await asyncio.gather(*(rubric.measure(VIEW) for _ in range(32)))

    assert asyncio.run(measure_all()) == [{"met": 16.0}] * 32


def judge_says(text, folder, **settings):
    """The measures of VIEW by a judge that says the text, and what the judge was asked; it is gone without a text."""
    endpoint = Endpoint(lambda path, body: completion(text), (CHAT,))
    with closing(endpoint), closing(Judges(folder)) as judges:
        judge = JudgeGrader(url=f"{endpoint.url}/v1" if text else "http://127.0.0.1:9/v1", model="j", retries=0)
        measure = JudgeMeasure(kind="judge", rubric="Is it polite?", judge=judge, **settings)
        assert JudgeMeasure.model_validate_json(measure.model_dump_json()) == measure, "as a stage writes it"
        scorer = EpisodeScorer(EpisodeScoring(measures={"polite": measure}), (), judges=judges)
        found = asyncio.run(called(scorer.measure(VIEW)))
        assert asyncio.run(scorer.measure(VIEW)) == found
    ((_, body),) = endpoint.asked  # the second time, the verdict was remembered
    return found, body["messages"][0]["content"]


def test_a_judge_measures_an_episode_by_a_rubric_and_its_silence_is_no_zero_nor_its_absence_a_failure(tmp_path):
    found, asked = judge_says("Well. VERDICT: MET", tmp_path)
    assert found == {"polite": 1.0}
    assert "[Rubric]\nIs it polite?" in asked and "assistant: 3 + 4\n\nuser: 7\n\nassistant: 7" in asked
    found, asked = judge_says("Well. VERDICT: UNMET", tmp_path, shows="reply")
    assert found == {"polite": 0.0} and "[Response]\n7\n" in asked
    with pytest.raises(FailedEpisode) as failed:
        judge_says("I cannot say.", tmp_path)
    assert isinstance(failed.value.__cause__, NoVerdict)
    assert str(failed.value.__cause__).startswith("measure polite: judge: the reply holds no verdict")
    with pytest.raises(LostError, match=r"measure polite: judge: http://127\.0\.0\.1:9/v1: no answer"):
        judge_says("", tmp_path)
    with pytest.raises(ValidationError, match="prompt has no effect here"):
        judge = {"url": "http://h", "model": "j", "prompt": "{reference} {answer}"}
        JudgeMeasure.model_validate({"kind": "judge", "rubric": "x", "judge": judge})


AT_ONCE = "fails before the first episode: "
NO_OPTIONS = "does not take environment.options: missing a required argument"


largest = max  # which has no signature to read


def guessing(weights=None, **measures):
    paths = {name: f"{__name__}:{path}" for name, path in measures.items()}
    scoring = EpisodeScoring(measures=paths, **({"weights": weights} if weights else {}))
    return GuessNumberEnvironment(kind="guess_number", scoring=scoring)


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        (custom("Missing"), "cannot be imported"),
        (custom("fails", limit=2), "is a function; it has to be a class"),
        (custom("Nothing"), "needs `async def reset`"),
        (custom("Synchronous", limit=2), "needs `async def respond`"),
        (custom("AwaitedCounts", limit=2), "needs `def counts`"),
        (custom("Fails", limit=2), f"{AT_ONCE}OSError: no 2"),
        (custom("FailsToCount", limit=2), f"{AT_ONCE}TypeError"),
        (custom("CountTo"), f"{NO_OPTIONS}: 'limit'"),
        (custom("CountTo", limits=3), NO_OPTIONS),
        (tools("synthetic.sample_tools:with_stale_docs"), "environment.tools: synthetic.sample_tools:with_stale_docs"),
        (mixture(weights={"tool_errors": -0.1}), "nothing measures tool_errors"),
        (guessing({"lenght": 1.0}, length="words"), "nothing measures lenght; there are answer, found, "),
        (guessing(found="words"), "counts found already"),
        (guessing(bad="played"), "asks for environment; a measure may take prompt, completion, answer"),
        (guessing(gone="not_there"), "cannot be imported"),
        (guessing(bad="largest"), "does not tell its parameters"),
    ],
)
def test_an_environment_that_cannot_be_played_or_scored_is_refused(environment, words):
    with refused("environment.factory: test_environments:" if environment.kind == "custom" else "", words):
        open_scored(environment)

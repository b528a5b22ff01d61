"""The game of guessing a number, and what environments of one's own read a turn with."""

import asyncio

import pytest

from luffy.config.environment import GuessNumberEnvironment
from luffy.environments import after_thinking, xml_fields
from luffy.environments.registry import open_environment
from luffy.errors import DataError
from luffy.grading.request import Problem
from luffy.types import Message

CONFIG = GuessNumberEnvironment(kind="guess_number")


def play(number, turns):
    """The environment's answers to the turns, and its counts."""

    async def game():
        environment = open_environment(CONFIG)()
        assert await environment.reset(Problem(extra_info={"number": number})) == ()
        answers = [await environment.respond([Message("user", "Guess."), Message("assistant", turn)]) for turn in turns]
        counts = environment.counts()
        await environment.close()
        return [answer and answer[0].content for answer in answers], counts

    return asyncio.run(game())


def test_a_game_ends_with_the_right_guess():
    answers, counts = play(37, ["50", "I guess 25!", "37<|im_end|>"])
    assert answers == ["lower", "higher", None]
    assert counts == {"guesses": 3.0, "turns_without_guess": 0.0, "found": 1.0}


def test_a_turn_without_a_number_is_answered_and_counted():
    answers, counts = play(3, ["no idea", "<think>perhaps 3", "3.5", "1" * 40, ""])
    assert answers == ["Please guess a whole number."] * 5
    assert counts == {"guesses": 0.0, "turns_without_guess": 5.0, "found": 0.0}


@pytest.mark.parametrize(
    ("turn", "answer"),
    [
        ("<think>It is 5.</think> 7", "lower"),
        ("between 1 and 4", "higher"),
        ("-5", "higher"),
        ("3-4", "higher"),
        ("**5**", None),
        ("\\boxed{5}", None),
        ("<answer>5</answer>.", None),
        ("My guess is 5.", None),
    ],
)
def test_the_last_whole_number_after_the_reasoning_is_the_guess(turn, answer):
    assert play(5, [turn])[0] == [answer]


@pytest.mark.parametrize("info", [{}, {"number": "5"}, {"number": True}])
def test_a_problem_without_a_number_is_refused(info):
    with pytest.raises(DataError, match=r"quiz: guess_number needs a whole number as extra_info.number"):
        asyncio.run(open_environment(CONFIG)().reset(Problem(data_source="quiz", extra_info=info)))


@pytest.mark.parametrize(
    ("turn", "reply"),
    [
        ("<think>a</think>b", "b"),
        ("a</think>b", "b"),
        ("<think>a</think>b<think>c</think>d", "d"),
        ("plain", "plain"),
        ("<think>never closed", ""),
        ("<think>a</think>b<think>again", ""),
        ("", ""),
    ],
)
def test_only_the_text_after_the_reasoning_is_left(turn, reply):
    assert after_thinking(turn) == reply


def test_fields_are_the_first_elements_of_their_names():
    text = "<reasoning>\nwhy\n</reasoning>\n<code>x = 1</code><code>second</code><empty></empty><open>"
    assert xml_fields(text, ["reasoning", ("code", "answer"), "empty", "open"]) == {
        "reasoning": "why",
        "code": "x = 1",
        "answer": None,
        "empty": "",
        "open": None,
    }

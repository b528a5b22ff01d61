"""The game of guessing a five-letter word: its marks, its turns, and the player of the demonstrations."""

import asyncio
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from luffy.config import load_experiment
from luffy.config.data import FiveLettersSource
from luffy.config.environment import FiveLettersEnvironment
from luffy.data.five_letter_words import FIVE_LETTER_WORDS, feedback
from luffy.data.sources import load_source, open_source
from luffy.data.verify_traces import Replayed
from luffy.environments.registry import instructions_of, open_environment
from luffy.environments.trace_replay import EnvironmentReplayer
from luffy.errors import ConfigError, DataError
from luffy.grading import Problem
from luffy.types import Message

CONFIG = FiveLettersEnvironment(kind="five_letters")
EXAMPLE = Path(__file__).parents[3] / "exp_configs" / "five_letters.yaml"
FEW_LETTERS = st.text("abc", min_size=5, max_size=5)
"""Words in which letters repeat."""


def reference_marks(guess, word):
    """Each mark by counting over the whole words, without a state that one letter leaves to the next."""
    marks = ""
    for place, letter in enumerate(guess):
        if word[place] == letter:
            marks += "G"
            continue
        unplaced = sum(w == letter != g for g, w in zip(guess, word, strict=True))
        misplaced_before = sum(g == letter != w for g, w in zip(guess[:place], word[:place], strict=True))
        marks += "Y" if misplaced_before < unplaced else "-"
    return marks


def play(word, turns):
    """The environment's answers to the turns, and its counts."""

    async def game():
        environment = open_environment(CONFIG)()
        assert await environment.reset(Problem(extra_info={"word": word})) == ()
        answers = [await environment.respond([Message("user", "Guess."), Message("assistant", turn)]) for turn in turns]
        counts = environment.counts()
        await environment.close()
        return [answer and answer[0].content for answer in answers], counts

    return asyncio.run(game())


def games(**settings):
    source = FiveLettersSource(kind="five_letters", num_prompts=100, **settings)
    return load_source(source, "train", 3).prompts


@given(FEW_LETTERS, FEW_LETTERS)
def test_marks_of_repeated_letters_agree_with_the_reference(guess, word):
    assert feedback(guess, word) == reference_marks(guess, word)


@pytest.mark.parametrize(
    ("guess", "word", "marks"),
    [
        ("geese", "level", "-GY--"),
        ("llama", "level", "GY---"),
        ("eerie", "level", "YG---"),
        ("level", "level", "GGGGG"),
        ("sissy", "basis", "YYG--"),
    ],
)
def test_letters_in_place_are_marked_before_others(guess, word, marks):
    assert feedback(guess, word) == marks


def test_a_game_ends_with_the_right_word():
    answers, counts = play(
        "crane", ["<think>crane?</think> I guess CRASH!", "\\boxed{dance}", "<answer>crane</answer>"]
    )
    assert answers == ["GGG--", "-YYYG", None]
    assert counts == {"guesses": 3.0, "turns_without_guess": 0.0, "unknown_words": 0.0, "found": 1.0}


def test_a_turn_without_a_word_of_the_list_is_answered_and_counted():
    answers, counts = play("crane", ["", "12345", "cranes", "<think>crane", "crâne", "zzzzz"])
    assert answers == [*["Please guess a five-letter word."] * 4, *["Unknown word, please guess another."] * 2]
    assert counts == {"guesses": 0.0, "turns_without_guess": 4.0, "unknown_words": 2.0, "found": 0.0}


@pytest.mark.parametrize("info", [{}, {"word": 5}, {"word": ["crane"]}, {"word": "zzzzz"}])
def test_a_problem_without_a_word_of_the_list_is_refused(info):
    with pytest.raises(DataError, match=r"quiz: five_letters needs a word of its list as extra_info.word; found"):
        asyncio.run(open_environment(CONFIG)().reset(Problem(data_source="quiz", extra_info=info)))


def test_the_list_has_different_lower_case_words_of_five_letters():
    assert len(set(FIVE_LETTER_WORDS)) == len(FIVE_LETTER_WORDS)
    assert all(len(word) == 5 and word.isascii() and word.isalpha() and word.islower() for word in FIVE_LETTER_WORDS)


def test_the_limit_of_num_words_is_the_length_of_the_list():
    assert {game.ground_truth for game in games(num_words=len(FIVE_LETTER_WORDS))} <= set(FIVE_LETTER_WORDS)
    for wrong in (1, len(FIVE_LETTER_WORDS) + 1):
        with pytest.raises(ConfigError, match=r"data\.train.*num_words") as caught:
            load_experiment(EXAMPLE, [f"data.train.num_words={wrong}"])
        assert "\n" not in str(caught.value)


def test_every_guess_of_the_consistent_player_agrees_with_all_earlier_answers():
    for game in games():
        turns = [turn.content for turn in game.traces[0].turns]
        guesses, answers = turns[::2], turns[1::2]
        assert len(guesses) == len(set(guesses)) <= 6
        for place, guess in enumerate(guesses):
            for earlier, marks in zip(guesses[:place], answers[:place], strict=True):
                assert reference_marks(earlier, guess) == marks


def test_the_consistent_player_finds_more_words_than_the_random_one():
    found = {
        player: sum(
            game.traces[0].turns[-1].content == game.ground_truth for game in games(num_words=32, player=player)
        )
        for player in ("consistent", "random")
    }
    assert found["consistent"] > 90 and found["random"] < 50


def test_games_are_a_function_of_seed_and_purpose():
    source = FiveLettersSource(kind="five_letters", num_prompts=5)
    texts = {
        (seed, purpose): load_source(source, purpose, seed) for seed in (3, 4) for purpose in ("train", "suites.a")
    }
    assert texts[3, "train"] == load_source(source, "train", 3)
    assert len({prompt.uid for loaded in texts.values() for prompt in loaded.prompts}) == 20
    assert len({loaded.sha256 for loaded in texts.values()}) == 4
    assert open_source(source, "train", 3).is_light


@pytest.mark.parametrize("player", ["consistent", "random"])
def test_demonstrations_come_out_the_same_when_they_are_played_again(player):
    prompts = [game for game in games(player=player) if len(game.traces[0].turns) > 1]
    assert EnvironmentReplayer(CONFIG).replay(prompts) == [[Replayed.SAME]] * len(prompts)


def test_the_rules_of_the_words_are_left_to_the_prompt():
    assert instructions_of(CONFIG) == ""

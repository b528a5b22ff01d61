"""The game of guessing a five-letter word: a mark for each letter after each guess, until the word is found."""

import re
from collections.abc import Mapping, Sequence

from luffy.data.five_letter_words import FIVE_LETTER_WORDS, feedback
from luffy.environments.parsers import after_thinking
from luffy.errors import DataError
from luffy.grading import Problem
from luffy.types import Message

_TAG = re.compile(r"<[^<>]*>")
_WORD = re.compile(r"[^\W\d_]+")
_KNOWN = frozenset(FIVE_LETTER_WORDS)


class FiveLettersGame:
    """An episode of the game; `extra_info` of the problem has the word, as `word`."""

    def __init__(self) -> None:
        self._word = ""
        self._num_guesses = 0
        self._num_unreadable = 0
        self._num_unknown = 0
        self._is_found = False

    async def reset(self, problem: Problem) -> Sequence[Message]:
        """Read the problem's word; DataError where it has none, or one that is not in the list."""
        word = problem.extra_info.get("word")
        if not isinstance(word, str) or word not in _KNOWN:
            raise DataError(
                f"{problem.data_source}: five_letters needs a word of its list as extra_info.word; found {word!r}"
            )
        self._word = word
        return ()

    async def respond(self, conversation: Sequence[Message]) -> Sequence[Message] | None:
        """Mark the letters of the last word of the turn's reply; None when it is right."""
        words = _WORD.findall(_TAG.sub(" ", after_thinking(conversation[-1].content)))
        if not words or len(words[-1]) != len(self._word):
            self._num_unreadable += 1
            return [Message("user", "Please guess a five-letter word.")]
        guess = words[-1].lower()
        if guess not in _KNOWN:
            self._num_unknown += 1
            return [Message("user", "Unknown word, please guess another.")]
        self._num_guesses += 1
        self._is_found = guess == self._word
        return None if self._is_found else [Message("user", feedback(guess, self._word))]

    def counts(self) -> Mapping[str, float]:
        """Guesses, turns without one, words that are not in the list, and whether the word was found."""
        return {
            "guesses": float(self._num_guesses),
            "turns_without_guess": float(self._num_unreadable),
            "unknown_words": float(self._num_unknown),
            "found": float(self._is_found),
        }

    async def close(self) -> None:
        """Nothing is held."""

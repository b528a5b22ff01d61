"""The game of guessing a number: `higher` or `lower` after each guess, until it is right."""

import re
from collections.abc import Mapping, Sequence

from luffy.environments.transcript import after_thinking
from luffy.errors import DataError
from luffy.grading.request import Problem
from luffy.types import Message

_WHOLE_NUMBER = re.compile(r"(?<![\w.])-?[0-9]{1,18}(?![\w]|\.[0-9])")


class GuessingGame:
    """An episode of the game; `extra_info` of the problem has the number, as `number`."""

    def __init__(self) -> None:
        self._number = 0
        self._num_guesses = 0
        self._num_unreadable = 0
        self._is_found = False

    async def reset(self, problem: Problem) -> Sequence[Message]:
        """Read the problem's number; DataError where it has none."""
        number = problem.extra_info.get("number")
        if type(number) is not int:
            raise DataError(
                f"{problem.data_source}: guess_number needs a whole number as extra_info.number; found {number!r}"
            )
        self._number = number
        return ()

    async def respond(self, conversation: Sequence[Message]) -> Sequence[Message] | None:
        """Compare the last whole number of the turn's reply; None when it is right."""
        guesses = _WHOLE_NUMBER.findall(after_thinking(conversation[-1].content))
        if not guesses:
            self._num_unreadable += 1
            return [Message("user", "Please guess a whole number.")]
        self._num_guesses += 1
        guess = int(guesses[-1])
        self._is_found = guess == self._number
        if self._is_found:
            return None
        return [Message("user", "higher" if self._number > guess else "lower")]

    def counts(self) -> Mapping[str, float]:
        return {
            "guesses": float(self._num_guesses),
            "turns_without_guess": float(self._num_unreadable),
            "found": float(self._is_found),
        }

    async def close(self) -> None: ...

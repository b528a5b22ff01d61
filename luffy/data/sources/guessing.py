"""Games of guessing a number by `higher` and `lower`, with the turns of a player as the trace.

Each prompt has a game number, which makes it a distinct problem; the number to find is only in `extra_info`. A game
depends only on the settings, the seed, the purpose and its index.
"""

import hashlib
import json
from collections.abc import Iterator

import numpy as np

from luffy.config.data import GuessNumberSource
from luffy.data.prompt_identity import prompt_uid
from luffy.data.schema import joined_text
from luffy.seeds import derive_seed
from luffy.types import Message, Prompt, Trace


class GuessingGames:
    """`source.num_prompts` games, each with one trace."""

    kind = "guess_number"
    is_light = True

    def __init__(self, source: GuessNumberSource, purpose: str, seed: int) -> None:
        self._source, self._purpose, self._seed = source, purpose, seed

    def inputs(self) -> dict[str, str]:
        """The settings: games are a function of them."""
        settings = json.dumps(self._source.model_dump(mode="json"), sort_keys=True)
        return {"settings": hashlib.sha256(f"{self._seed}:{self._purpose}:{settings}".encode()).hexdigest()}

    def rows(self) -> Iterator[Prompt]:
        """Yield one game after another."""
        for place in range(self._source.num_prompts):
            seed = derive_seed(self._seed, "guess_number", self._purpose, place)
            yield self._game(np.random.Generator(np.random.PCG64(seed)))

    def _game(self, rng: np.random.Generator) -> Prompt:
        source = self._source
        number = int(rng.integers(source.low, source.high + 1))
        name = int(rng.integers(0, 10**9))
        messages = (Message("user", f"Game {name:09d}: guess a number from {source.low} to {source.high}."),)
        turns = tuple(_turns(source, number, rng))
        return Prompt(
            uid=prompt_uid(self.kind, messages),
            data_source=self.kind,
            messages=messages,
            ground_truth=str(number),
            traces=(Trace(joined_text(turns), f"{source.player}-player", turns=turns),),
            ability="game",
            extra_info={"number": number},
            grader="exact",
        )


def _turns(source: GuessNumberSource, number: int, rng: np.random.Generator) -> Iterator[Message]:
    low, high = source.low, source.high
    for turn in range(source.max_turns):
        guess = (low + high) // 2 if source.player == "bisecting" else int(rng.integers(source.low, source.high + 1))
        yield Message("assistant", str(guess))
        if guess == number or turn == source.max_turns - 1:
            return
        yield Message("user", "higher" if number > guess else "lower")
        low, high = (guess + 1, high) if number > guess else (low, guess - 1)

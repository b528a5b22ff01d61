"""Games of guessing a number, with the turns of a player as their traces.

A game's prompt has a number, which makes it a distinct problem; the number to find is only in `extra_info`.
"""

from collections.abc import Iterator

import numpy as np

from luffy.config.data import GuessNumberSource
from luffy.data.schema import joined_text, prompt_uid
from luffy.data.sources import from_generator
from luffy.seeds import derive_seed
from luffy.types import Message, Prompt, Trace


@from_generator
def guessing_games(source: GuessNumberSource, purpose: str, seed: int) -> Iterator[Prompt]:
    """`source.num_prompts` games, each with one trace."""
    for place in range(source.num_prompts):
        rng = np.random.Generator(np.random.PCG64(derive_seed(seed, "guess_number", purpose, place)))
        number = int(rng.integers(source.low, source.high + 1))
        name = int(rng.integers(0, 10**9))
        messages = (Message("user", f"Game {name:09d}: guess a number from {source.low} to {source.high}."),)
        turns = tuple(_turns(source, number, rng))
        yield Prompt(
            uid=prompt_uid("guess_number", messages),
            data_source="guess_number",
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

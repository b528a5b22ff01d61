"""Games of guessing a five-letter word, with the turns of a player as the trace.

Each prompt has a game number, which makes it a distinct problem; the word is only in `ground_truth` and `extra_info`. A
game depends only on the settings, the seed, the purpose and its index.
"""

import hashlib
import json
from collections.abc import Iterator

import numpy as np

from luffy.config.data import FiveLettersSource
from luffy.data.five_letter_words import FIVE_LETTER_WORDS, feedback
from luffy.data.prompt_identity import prompt_uid
from luffy.data.schema import joined_text
from luffy.seeds import derive_seed
from luffy.types import Message, Prompt, Trace


class WordGames:
    """`source.num_prompts` games, each with one trace."""

    kind = "five_letters"
    is_light = True

    def __init__(self, source: FiveLettersSource, purpose: str, seed: int) -> None:
        self._source, self._purpose, self._seed = source, purpose, seed
        self._words = FIVE_LETTER_WORDS[: source.num_words]

    def inputs(self) -> dict[str, str]:
        """The settings and the words: games are a function of them."""
        settings = json.dumps([self._source.model_dump(mode="json"), self._words], sort_keys=True)
        return {"settings": hashlib.sha256(f"{self._seed}:{self._purpose}:{settings}".encode()).hexdigest()}

    def rows(self) -> Iterator[Prompt]:
        """Yield one game after another."""
        for place in range(self._source.num_prompts):
            seed = derive_seed(self._seed, self.kind, self._purpose, place)
            yield self._game(np.random.Generator(np.random.PCG64(seed)))

    def _game(self, rng: np.random.Generator) -> Prompt:
        word = self._words[int(rng.integers(len(self._words)))]
        name = int(rng.integers(0, 10**9))
        # Fewer words than `data.decontamination.ngram`: otherwise the rules, which games share, would be contamination.
        rules = f"Game {name:09d}: guess a five-letter word. G: placed, Y: elsewhere, -: absent."
        messages = (Message("user", rules),)
        turns = tuple(self._turns(word, rng))
        return Prompt(
            uid=prompt_uid(self.kind, messages),
            data_source=self.kind,
            messages=messages,
            ground_truth=word,
            traces=(Trace(joined_text(turns), f"{self._source.player}-player", turns=turns),),
            ability="game",
            extra_info={"word": word},
            grader="exact",
        )

    def _turns(self, word: str, rng: np.random.Generator) -> Iterator[Message]:
        candidates = self._words
        for turn in range(self._source.max_turns):
            guess = candidates[int(rng.integers(len(candidates)))]
            yield Message("assistant", guess)
            if guess == word or turn == self._source.max_turns - 1:
                return
            marks = feedback(guess, word)
            yield Message("user", marks)
            if self._source.player == "consistent":
                candidates = tuple(other for other in candidates if feedback(guess, other) == marks)

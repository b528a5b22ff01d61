r"""Generated problems whose traces a rule writes: games of guessing a number, and word problems.

A game's prompt has a number, which makes it a distinct problem; the number to find is only in `extra_info`. The trace
has the turns of a player.

A word problem has several calculations, and a teacher that writes each calculation on its own line:

    Mia has 14 apples. Then she buys 3 bags of 6 apples each. Later, she sells half of the apples. How many apples does
    Mia have now?

    3 * 6 = 18, 14 + 18 = 32
    32 / 2 = 16
    \boxed{16}

It does not state the answer format: do so in `data.system_prompt`. Each problem depends only on the settings, the seed,
the purpose and its index.
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import TypeVar

import numpy as np

from luffy.config.data import GuessNumberSource, WordProblemSource
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


_T = TypeVar("_T")
AUTHOR = "word-problem-teacher"
_NAMES = {
    "she": ("Anna", "Clara", "Ella", "Grace", "Lena", "Mia", "Nora", "Ruth", "Sara", "Zoe"),
    "he": ("Adam", "Ben", "Carl", "David", "Eric", "Hugo", "Ivan", "Max", "Paul", "Tom"),
}
_ITEMS = ("apples", "beads", "books", "buttons", "cards", "coins", "cookies", "marbles", "pencils", "shells", "stamps")
_LINKS = ("", "Then ", "Later, ", "After that, ", "The next day, ")
_MANY, _MOST = 220, 300
"""Above the first number of items none are added, and no multiplication exceeds the second."""


class _Dice:
    """The random numbers for one problem."""

    def __init__(self, seed: int) -> None:
        self._generator = np.random.Generator(np.random.PCG64(seed))

    def number(self, low: int, high: int) -> int:
        """A whole number from `low` to `high`, both included."""
        return int(self._generator.integers(low, high + 1))

    def one_of(self, options: Sequence[_T]) -> _T:
        """One of the options, all equally likely."""
        return options[self.number(0, len(options) - 1)]


def _event(dice: _Dice, count: int, items: str) -> tuple[str, str, int]:
    """What happens next: the sentence without its subject, the teacher's line, and the number of items after it.

    Nothing leaves less than 1 or more than 301 items.
    """
    downwards = [*(["loss"] if count > 2 else []), *(["half"] if count % 2 == 0 else [])]
    upwards = ["gain", "packs", *(["multiple"] if 3 * count <= _MOST else [])]
    kind = dice.one_of(downwards if count > _MANY else upwards + downwards)
    if kind == "gain":
        more = dice.number(2, 40)
        texts = (f"finds {more} more {items}", f"buys {more} more {items}", f"gets {more} {items} from a neighbor")
        return dice.one_of(texts), f"{count} + {more} = {count + more}", count + more
    if kind == "loss":
        fewer = dice.number(2, min(count - 1, 40))
        texts = (f"gives {fewer} {items} to a friend", f"loses {fewer} {items}", f"sells {fewer} {items}")
        return dice.one_of(texts), f"{count} - {fewer} = {count - fewer}", count - fewer
    if kind == "packs":
        packs, size = dice.number(2, 9), dice.number(2, 9)
        bought, after = packs * size, count + packs * size
        work = f"{packs} * {size} = {bought}, {count} + {bought} = {after}"
        bags, boxes = f"bags of {size} {items} each", f"boxes with {size} {items} in each of them"
        return dice.one_of((f"buys {packs} {bags}", f"is given {packs} {boxes}")), work, after
    if kind == "half":
        texts = (f"gives half of the {items} to a friend", f"loses half of the {items}", f"sells half of the {items}")
        return dice.one_of(texts), f"{count} / 2 = {count // 2}", count // 2
    factor = dice.number(2, 3)
    text = f"collects until there are {'twice' if factor == 2 else 'three times'} as many {items}"
    return text, f"{count} * {factor} = {count * factor}", count * factor


@from_generator
def word_problems(source: WordProblemSource, purpose: str, seed: int) -> Iterator[Prompt]:
    """`source.num_prompts` distinct problems, each with one trace.

    They cycle through the numbers of events, so that each has the same number of problems, to within one.
    """
    seen = set[str]()
    for number in itertools.count():
        if len(seen) == source.num_prompts:
            return
        dice = _Dice(derive_seed(seed, "word_problems", purpose, number))
        prompt = _problem(dice, source.num_events[len(seen) % len(source.num_events)])
        if prompt.uid not in seen:
            seen.add(prompt.uid)
            yield prompt


def _problem(dice: _Dice, num_events: int) -> Prompt:
    pronoun = dice.one_of(tuple(_NAMES))
    name, items, count = dice.one_of(_NAMES[pronoun]), dice.one_of(_ITEMS), dice.number(4, 40)
    sentences, lines = [f"{name} has {count} {items}."], []
    for _ in range(num_events):
        text, work, count = _event(dice, count, items)
        sentence = f"{dice.one_of(_LINKS)}{pronoun} {text}."
        sentences.append(sentence[0].upper() + sentence[1:])
        lines.append(work)
    messages = (Message("user", " ".join([*sentences, f"How many {items} does {name} have now?"])),)
    return Prompt(
        uid=prompt_uid("word_problems", messages),
        data_source="word_problems",
        messages=messages,
        ground_truth=str(count),
        traces=(Trace("\n".join([*lines, f"\\boxed{{{count}}}"]), AUTHOR),),
        extra_info={"num_events": num_events},
    )

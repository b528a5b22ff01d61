"""Games of guessing a number, and tasks of the packages reasoning-gym and verifiers.

A game's prompt has a number, which makes it a distinct problem; the number to find is only in `extra_info`, and the
trace has the turns of a player.

    pip install 'luffy-rl[reasoning-gym]'

reasoning-gym (arXiv 2505.24760) has no traces. Reference answers come from the package. By default responses are
compared with them, which suits tasks with mathematical answers (`chain_sum`, `gcd`, `simple_equations`). With a grader
of `kind: reasoning_gym` the package scores responses itself, which works for all tasks whose entries survive a round
trip through JSON.

Tasks of verifiers come in the order of the environment's data set; `extra_info.verifiers_task` identifies a task: its
split, its row, and a digest of its content.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from luffy.config.data import GuessNumberSource, ReasoningGymSource, VerifiersSource
from luffy.config.grading import GYM_ENTRY
from luffy.config.strict import FOR_IDENTITY
from luffy.data.schema import joined_text, prompt_uid
from luffy.data.sources import QuarantinedRow, Row, from_generator
from luffy.errors import DataError
from luffy.hosted.verifiers_process import shared_process
from luffy.json_text import parse_json
from luffy.seeds import derive_seed
from luffy.types import Message, Prompt, Trace

if TYPE_CHECKING:
    from reasoning_gym.dataset import ProceduralDataset


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


_UNSTABLE = frozenset({"isomorphic_strings", "knight_swap", "polynomial_multiplication", "ransom_note", "word_ladder"})
"""Tasks that depend on Python's string hashes, which change from process to process."""


class ReasoningGymPrompts:
    """`num_prompts` prompts from the tasks in turn; a function of (seed, purpose) and the settings."""

    kind = "reasoning_gym"
    is_light = False

    def __init__(self, source: ReasoningGymSource, purpose: str, seed: int) -> None:
        unstable = sorted(_UNSTABLE & set(source.tasks))
        if unstable:
            raise DataError(f"data.{purpose}.tasks: {', '.join(unstable)} differ from run to run; leave them out")
        self._source, self._purpose, self._seed = source, purpose, seed
        try:
            import reasoning_gym  # optional
        except ImportError:
            raise DataError(
                f"data.{purpose}: kind: reasoning_gym needs its package: pip install 'luffy-rl[reasoning-gym]'"
            ) from None
        size = -(-source.num_prompts // len(source.tasks))
        self._tasks: list[ProceduralDataset] = []
        for name in source.tasks:
            number, options = derive_seed(seed, purpose, name) % 2**31, source.options.get(name, {})
            try:
                self._tasks.append(reasoning_gym.create_dataset(name, size=size, seed=number, **options))
            except (ValueError, AssertionError, TypeError) as error:
                raise DataError(f"data.{purpose}.tasks: {name}: {error}") from None

    def inputs(self) -> dict[str, str]:
        from importlib.metadata import version

        settings = json.dumps(self._source.model_dump(mode="json", context=FOR_IDENTITY), sort_keys=True)
        text = f"{version('reasoning-gym')}:{self._seed}:{self._purpose}:{settings}"
        return {"settings": hashlib.sha256(text.encode()).hexdigest()}

    def rows(self) -> Iterator[Row]:
        for index in range(self._source.num_prompts):
            number, which = divmod(index, len(self._tasks))
            name = self._source.tasks[which]
            item = self._tasks[which][number]
            answer = item["answer"]
            if answer is None or not str(answer).strip():
                yield QuarantinedRow(f"reasoning_gym.{name}", index + 1, "answer", "is missing")
                continue
            info: dict[str, object] = {}
            if self._source.grader is not None:  # the package scores answers by the entry later
                score = self._tasks[which].score_answer
                try:
                    entry = parse_json(json.dumps(item))
                    comes_back = score(answer, entry) == score(answer, item)
                except (TypeError, ValueError, KeyError, IndexError, AttributeError, RecursionError):
                    comes_back = False
                if not comes_back:
                    yield QuarantinedRow(f"reasoning_gym.{name}", index + 1, "metadata", "does not come back from JSON")
                    continue
                info = {GYM_ENTRY: {"task": name, "options": self._source.options.get(name, {}), "entry": entry}}
            messages = (Message("user", str(item["question"])),)
            yield Prompt(
                uid=prompt_uid(f"reasoning_gym/{name}", messages),
                data_source=f"reasoning_gym/{name}",
                messages=messages,
                ground_truth=str(answer),
                ability="reasoning",
                extra_info=info,
                grader=self._source.grader,
            )


_AT_ONCE = 256
_SCORED = "(scored by the environment)"
"""Reference of a task that has none."""


class VerifiersTasks:
    """The first `num_prompts` tasks of a split."""

    kind = "verifiers"
    is_light = False

    def __init__(self, source: VerifiersSource, purpose: str, seed: int) -> None:
        self._source = source
        self._where = f"data.{purpose}"

    def inputs(self) -> dict[str, str]:
        digests = [task["digest"] for task in self._tasks()]
        return {"tasks": hashlib.sha256(json.dumps(digests).encode()).hexdigest()}

    def rows(self) -> Iterator[Row]:
        name = f"verifiers/{self._source.environment}"
        for row, task in enumerate(self._tasks()):
            messages = tuple(Message(each["role"], each["content"]) for each in task["messages"])
            if not any(message.content.strip() for message in messages):
                yield QuarantinedRow(name, row + 1, "prompt", "is empty")
                continue
            place = {"split": self._source.split, "row": row, "digest": task["digest"]}
            yield Prompt(
                uid=prompt_uid(f"{name}/{json.dumps(place)}", messages),  # different games may have equal prompts
                data_source=name,
                messages=messages,
                ground_truth=task["answer"].strip() or _SCORED,
                ability=task["task"] or "environment",
                extra_info={"info": task["info"], "verifiers_task": place},
                grader=self._source.grader,
            )

    def _tasks(self) -> Iterator[Mapping[str, Any]]:
        process, split = shared_process(self._source), self._source.split
        sizes = process.description.tasks
        if not sizes.get(split):
            raise DataError(
                f"{self._where}.split: the environment {self._source.environment} has no tasks in {split}; "
                f"there are {', '.join(f'{name} ({size})' for name, size in sizes.items())}"
            )
        stop = min(sizes[split], self._source.num_prompts or sizes[split])
        for start in range(0, stop, _AT_ONCE):
            found = process.call("tasks", split=split, start=start, stop=min(stop, start + _AT_ONCE))
            yield from cast(list[Mapping[str, Any]], found)

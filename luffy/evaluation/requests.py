"""What a model is asked: one suite under one decoding, as prompts and seeds.

The draw of a response depends on (seed, suite, decoding, problem, sample) alone, so every checkpoint meets the same
random numbers, and an evaluation that resumes or is batched differently asks for the same draws. Nothing here knows of
grading: what two inquiries have in common (`Inquiry.digest`), responses can have in common.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from luffy.config.evaluation import EvaluationConfig, SuiteProtocol
from luffy.data.prompt_templates import stops_of
from luffy.evaluation.sample_log import Key
from luffy.seeds import derive_seed
from luffy.types import FinishReason, Message, Prompt


@dataclass(frozen=True, slots=True)
class Suite:
    """Problems that are evaluated together."""

    name: str
    prompts: Sequence[Prompt]


@dataclass(frozen=True, slots=True)
class AskedPrompt:
    """A prompt as it is put to the model: by its ids, by its turns, or else by its text."""

    text: str
    """For records."""
    ids: tuple[int, ...] = ()
    messages: tuple[Message, ...] = ()

    @property
    def length(self) -> int:
        """Of those that one model is asked, to be asked in this order."""
        return len(self.ids) or len(self.text)


Ask = Callable[[Sequence[Prompt], str], list[AskedPrompt]]
"""Puts prompts under the template of that name; DataError for one that it cannot ask."""


@dataclass(frozen=True, slots=True)
class Task:
    """One response to get."""

    prompt: Prompt
    asked: AskedPrompt
    sample: int
    seed: int

    @property
    def key(self) -> Key:
        return self.prompt.uid, self.sample, self.seed


@dataclass(frozen=True, slots=True)
class Response:
    """What the model said, up to the text that ends it."""

    text: str
    num_tokens: int
    finish_reason: FinishReason


class Inquiry:
    """A suite under a decoding."""

    def __init__(self, suite: Suite, decoding: str, config: EvaluationConfig, ask: Ask, seed: int) -> None:
        self.suite = suite.name
        self.decoding = decoding
        self.how: SuiteProtocol = config.protocol(suite.name, decoding)
        self.max_response_tokens = config.max_response_tokens
        self._prompts = suite.prompts
        self._asked = ask(suite.prompts, self.how.template)
        self._seed = seed

    def tasks(self) -> list[Task]:
        """All responses to get, problem by problem."""
        return [
            Task(prompt, asked, sample, self._draw(prompt.uid, sample))
            for prompt, asked in zip(self._prompts, self._asked, strict=True)
            for sample in range(self.how.num_samples)
        ]

    def digest(self, drawn_by: Sequence[str]) -> str:
        """Hash of all that the responses depend on, where `drawn_by` says what the model is and how it draws."""
        how = self.how
        asked = {
            "drawn_by": list(drawn_by),
            "cell": [self._seed, self.suite, self.decoding, how.num_samples],
            "sampling": [how.temperature, how.top_p, self.max_response_tokens],
            "template": [how.template, *stops_of(how.template), *how.stop],
            "problems": [[prompt.uid, asdict(asked)] for prompt, asked in zip(self._prompts, self._asked, strict=True)],
        }
        return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()

    def _draw(self, uid: str, sample: int) -> int:
        return derive_seed(self._seed, "evaluate", self.suite, self.decoding, uid, sample)


def asking_order(tasks: Sequence[Task]) -> list[int]:
    """The places of `tasks` in the order in which they are asked: prompts of a length together waste no padding."""
    return sorted(range(len(tasks)), key=lambda i: (tasks[i].asked.length, i))


def places(order: Sequence[int]) -> list[int]:
    """Where in `order` each task is."""
    found = [0] * len(order)
    for place, i in enumerate(order):
        found[i] = place
    return found

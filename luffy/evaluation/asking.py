"""What a model is asked: one suite under one decoding, as token ids and seeds, and how what comes back is read.

The draw of a response depends on (seed, suite, decoding, problem, sample) alone, so every checkpoint meets the same
random numbers, and an evaluation that resumes or is batched differently asks for the same draws. Nothing here knows of
grading: what two inquiries have in common (`Inquiry.digest`), responses can have in common.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from transformers import PreTrainedTokenizerBase

from luffy.config.evaluation import EvaluationConfig, SuiteProtocol
from luffy.data.prompt_templates import ask, opener_behind, stops_of
from luffy.data.templates import decode, stop_token_ids
from luffy.evaluation.sample_log import Key
from luffy.rollout.engine import Completion, SamplingParams
from luffy.seeds import derive_seed
from luffy.types import FinishReason, Prompt


@dataclass(frozen=True, slots=True)
class Suite:
    """Problems that are evaluated together."""

    name: str
    prompts: Sequence[Prompt]


@dataclass(frozen=True, slots=True)
class Task:
    """One response to get."""

    prompt: Prompt
    prompt_ids: tuple[int, ...]
    prompt_text: str
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

    def __init__(
        self, suite: Suite, decoding: str, config: EvaluationConfig, tokenizer: PreTrainedTokenizerBase, seed: int
    ) -> None:
        self.suite = suite.name
        self.decoding = decoding
        self.how: SuiteProtocol = config.protocol(suite.name, decoding)
        self._tokenizer = tokenizer
        self._prompts = suite.prompts
        self._ids = [tuple(ids) for ids in ask(tokenizer, suite.prompts, self.how.template)]
        self._seed = seed
        # A template may have opened the reasoning in the prompt: without its opener, a box inside unfinished reasoning
        # would pass for an answer.
        self._opener = opener_behind(tokenizer, self.how.template)
        self.params = SamplingParams(
            self.how.temperature,
            config.max_response_tokens,
            stop_token_ids(tokenizer),
            self.how.top_p,
            (*stops_of(self.how.template), *self.how.stop),
        )

    def tasks(self) -> list[Task]:
        """All responses to get, problem by problem."""
        texts = [decode(self._tokenizer, ids) for ids in self._ids]
        return [
            Task(prompt, ids, text, sample, self._draw(prompt.uid, sample))
            for prompt, ids, text in zip(self._prompts, self._ids, texts, strict=True)
            for sample in range(self.how.num_samples)
        ]

    def response(self, completion: Completion) -> Response:
        """The text up to the first of the texts that end it, and how many tokens that took."""
        ids, stops = completion.token_ids, self.params.stop
        text = decode(self._tokenizer, ids)
        end = _end_of_first(text, stops)
        if end is None:
            return Response(self._opener + text, len(ids), completion.finish_reason)
        num_tokens = _fewest(len(ids), lambda n: _end_of_first(decode(self._tokenizer, ids[:n]), stops) is not None)
        return Response(self._opener + text[:end], num_tokens, FinishReason.STOP)

    def digest(self, drawn_by: Sequence[str]) -> str:
        """Hash of all that the responses depend on, where `drawn_by` says what the model is and how it draws."""
        asked = {
            "drawn_by": list(drawn_by),
            "cell": [self._seed, self.suite, self.decoding, self.how.num_samples],
            "params": asdict(self.params),
            "opener": self._opener,
            "problems": [[prompt.uid, ids] for prompt, ids in zip(self._prompts, self._ids, strict=True)],
        }
        return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()

    def _draw(self, uid: str, sample: int) -> int:
        return derive_seed(self._seed, "evaluate", self.suite, self.decoding, uid, sample)


def asking_order(tasks: Sequence[Task]) -> list[int]:
    """The places of `tasks` in the order in which they are asked: prompts of a length together waste no padding."""
    return sorted(range(len(tasks)), key=lambda i: (len(tasks[i].prompt_ids), i))


def places(order: Sequence[int]) -> list[int]:
    """Where in `order` each task is."""
    found = [0] * len(order)
    for place, i in enumerate(order):
        found[i] = place
    return found


def _end_of_first(text: str, stops: Sequence[str]) -> int | None:
    """Where the first of the stop texts in `text` ends; None without one."""
    ends = [start + len(stop) for stop in stops if (start := text.find(stop)) >= 0]
    return min(ends, default=None)


def _fewest(most: int, holds: Callable[[int], bool]) -> int:
    """The least n in 1..most for which `holds`, which holds for `most` and, once it does, for every greater n."""
    low, high = 1, most
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle + 1, high)
    return low

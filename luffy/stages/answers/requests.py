"""What is asked: the responses that one suite needs under one decoding, with the prompt and the seed of each.

The seed of a response depends on (seed, suite, decoding, problem, sample) alone: every checkpoint gets the same random
numbers, and an evaluation that resumes or is batched differently requests the same samples. Nothing here knows about
grading, so requests with equal digests (`EvaluationRequest.digest`) can share their responses.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import TypeVar

from transformers import PreTrainedTokenizerBase

from luffy.config.evaluation import EvaluationConfig, SuiteProtocol
from luffy.data.prompt_templates import OWN, ask, stops_of
from luffy.errors import DataError
from luffy.seeds import derive_seed
from luffy.types import Message, Prompt

_Rendered = TypeVar("_Rendered")


@dataclass(frozen=True, slots=True)
class Suite:
    """Problems that are evaluated together."""

    name: str
    prompts: Sequence[Prompt]


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """A prompt as the model receives it: as token ids, as chat messages, or as text."""

    text: str
    """For records."""
    ids: tuple[int, ...] = ()
    messages: tuple[Message, ...] = ()

    @property
    def length(self) -> int:
        """Tokens, or characters where the tokenizer is unknown; only comparable between prompts for one model."""
        return len(self.ids) or len(self.text)


Render = Callable[[Sequence[Prompt], str], list[RenderedPrompt]]
"""Renders prompts with the template of that name; DataError for a prompt that does not fit the template."""


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """One response to generate."""

    key: str
    """In an `AnswerStore` of one model."""
    prompt: Prompt
    rendered: RenderedPrompt
    sample: int
    seed: int


def sample_key(suite: str, decoding: str, uid: str, sample: int) -> str:
    """`SampleRequest.key`."""
    return f"{decoding}\t{suite}\t{uid}\t{sample}"


class EvaluationRequest:
    """A suite under a decoding."""

    def __init__(self, suite: Suite, decoding: str, config: EvaluationConfig, render: Render, seed: int) -> None:
        self.suite = suite.name
        self.decoding = decoding
        self.protocol: SuiteProtocol = config.protocol(suite.name, decoding)
        self.max_response_tokens = config.max_response_tokens
        self._prompts = suite.prompts
        self._render = render
        self._seed = seed

    @cached_property
    def samples(self) -> list[SampleRequest]:
        """All responses to generate, problem by problem; DataError for a prompt that does not fit the template."""
        cell = self.suite, self.decoding
        return [
            SampleRequest(
                sample_key(*cell, prompt.uid, sample),
                prompt,
                rendered,
                sample,
                derive_seed(self._seed, "evaluate", *cell, prompt.uid, sample),
            )
            for prompt, rendered in zip(self._prompts, self._rendered, strict=True)
            for sample in range(self.protocol.num_samples)
        ]

    def in_batching_order(self) -> list[SampleRequest]:
        """The same in the order of generation: prompts of similar length share a batch, to save padding."""
        return sorted(self.samples, key=lambda sample: sample.rendered.length)

    def digest(self, sampled_by: Sequence[str]) -> str:
        """Hash of everything the responses depend on; `sampled_by` identifies the model, its engine and their code."""
        protocol = self.protocol
        content = {
            "sampled_by": list(sampled_by),
            "cell": [self._seed, self.suite, self.decoding, protocol.num_samples],
            "sampling": [protocol.temperature, protocol.top_p, self.max_response_tokens],
            "template": [protocol.template, *stops_of(protocol.template), *protocol.stop],
            "problems": [
                [prompt.uid, asdict(rendered)] for prompt, rendered in zip(self._prompts, self._rendered, strict=True)
            ],
        }
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    @cached_property
    def _rendered(self) -> list[RenderedPrompt]:
        return self._render(self._prompts, self.protocol.template)


def check_suite(
    suite: Suite,
    tokenizer: PreTrainedTokenizerBase,
    max_response_tokens: int,
    context_length: int | None,
    template: str = OWN,
) -> int:
    """Return the number of tokens of the longest prompt; `context_length` is None for a model without a stated limit.

    A part of a suite would be another benchmark under the same name. So this raises DataError as `check_problems`, and
    if a prompt leaves no space for `max_response_tokens`.
    """
    lengths = [len(ids) for ids in check_problems(suite, lambda prompts: ask(tokenizer, prompts, template))]
    room = None if context_length is None else context_length - max_response_tokens
    too_long = 0 if room is None else sum(length > room for length in lengths)
    if too_long:
        raise DataError(
            f"suite {suite.name}: {too_long} of {len(lengths)} prompts do not fit: the longest has {max(lengths)} "
            f"tokens, and {context_length} of the model less {max_response_tokens} of the response leave {room}; "
            "lower evaluation.max_response_tokens, or leave them out of the suite's source"
        )
    return max(lengths)


def check_problems(suite: Suite, render: Callable[[Sequence[Prompt]], list[_Rendered]]) -> list[_Rendered]:
    """The rendered prompts; DataError for an empty suite, a repeated problem, or one that does not fit the template."""
    if not suite.prompts:
        raise DataError(
            f"suite {suite.name}: has no problems; remove it from data.suites or give it a source with rows"
        )
    repeated = len(suite.prompts) - len({prompt.uid for prompt in suite.prompts})
    if repeated:
        raise DataError(
            f"suite {suite.name}: {repeated} rows repeat a problem; give each once, and set the number of responses a "
            "problem by num_samples in evaluation.decodings or evaluation.suites"
        )
    try:
        return render(suite.prompts)
    except DataError as error:
        raise DataError(f"suite {suite.name}: {error}") from None

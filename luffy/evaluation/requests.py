"""Evaluation requests: which responses one suite needs under one decoding, with the prompt and the seed of each.

The seed of a response depends on (seed, suite, decoding, problem, sample) alone: every checkpoint gets the same random
numbers, and an evaluation that resumes or is batched differently requests the same samples. Nothing here knows about
grading, so requests with equal digests (`EvaluationRequest.digest`) can share their responses.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field

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

    prompt: Prompt
    rendered: RenderedPrompt
    sample: int
    seed: int

    @property
    def key(self) -> Key:
        return self.prompt.uid, self.sample, self.seed


@dataclass(frozen=True, slots=True)
class Response:
    """Generated text, cut after the first stop text."""

    text: str
    """All turns, where an environment answered."""
    num_tokens: int
    """Without those of an environment."""
    finish_reason: FinishReason
    reply: str | None = None
    """The last turn of an episode; None: the text is a single turn."""
    measures: Mapping[str, float] = field(default_factory=dict)
    """Counts of the episode."""

    @property
    def graded_text(self) -> str:
        """What graders read."""
        return self.text if self.reply is None else self.reply

    @property
    def has_failed(self) -> bool:
        """Whether the environment failed, so that there is nothing to grade."""
        return self.finish_reason is FinishReason.ENVIRONMENT_ERROR


class EvaluationRequest:
    """A suite under a decoding."""

    def __init__(self, suite: Suite, decoding: str, config: EvaluationConfig, render: Render, seed: int) -> None:
        self.suite = suite.name
        self.decoding = decoding
        self.protocol: SuiteProtocol = config.protocol(suite.name, decoding)
        self.max_response_tokens = config.max_response_tokens
        self._prompts = suite.prompts
        self._rendered = render(suite.prompts, self.protocol.template)
        self._seed = seed

    def samples(self) -> list[SampleRequest]:
        """All responses to generate, problem by problem."""
        return [
            SampleRequest(prompt, rendered, sample, self._sample_seed(prompt.uid, sample))
            for prompt, rendered in zip(self._prompts, self._rendered, strict=True)
            for sample in range(self.protocol.num_samples)
        ]

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

    def _sample_seed(self, uid: str, sample: int) -> int:
        return derive_seed(self._seed, "evaluate", self.suite, self.decoding, uid, sample)


def batching_order(samples: Sequence[SampleRequest]) -> list[int]:
    """Indices of `samples` in the order of generation: prompts of similar length share a batch, to save padding."""
    return sorted(range(len(samples)), key=lambda i: (samples[i].rendered.length, i))


def positions(order: Sequence[int]) -> list[int]:
    """The inverse permutation: the position of each index in `order`."""
    found = [0] * len(order)
    for position, i in enumerate(order):
        found[i] = position
    return found

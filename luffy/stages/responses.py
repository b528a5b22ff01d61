"""What the stages share that have a finished model answer prompts: the choice of an engine, and their progress."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from luffy.config.execution import ExecutionConfig
from luffy.config.model import DType, EndpointModel
from luffy.data.prompt_templates import OWN
from luffy.evaluation.results import SampleRecord
from luffy.rollout.engine import SwappableEngine
from luffy.rollout.server_engine import ServerEngine
from luffy.rollout.text_answers import TextAnswers
from luffy.rollout.text_endpoint import CHAT, TEXT, TextEndpoint
from luffy.rollout.transformers_engine import TransformersEngine
from luffy.rollout.vllm_engine import VLLMEngine
from luffy.stages.program import StageContext

_FULL_BATCHES = 4
"""vLLM is given the prompts of so many full batches at a time: it fills the place of a response that ends, and only the
last batch of them runs empty."""


@dataclass(frozen=True, slots=True)
class Generator:
    """What answers the prompts."""

    engine: SwappableEngine
    batch_size: int
    """Prompts that it is best given at a time."""


@dataclass(frozen=True, slots=True)
class EndpointGenerator:
    """What answers prompts as text."""

    endpoint: TextEndpoint
    batch_size: int


def open_endpoint(
    model: EndpointModel, templates: Sequence[str], execution: ExecutionConfig, answers: TextAnswers
) -> EndpointGenerator:
    """A model that others serve, to be asked under all of `templates`; the caller closes it.

    Raises ConfigError for an endpoint that cannot be asked so.
    """
    config = execution.server
    paths = tuple(dict.fromkeys(CHAT if template == OWN else TEXT for template in templates))
    endpoint = TextEndpoint.connect(model, config, paths, answers)
    return EndpointGenerator(endpoint, _FULL_BATCHES * config.concurrency * len(config.urls))


def open_generator(engine: str, model: Path, dtype: DType, execution: ExecutionConfig, longest: int) -> Generator:
    """The engine of that name (`evaluation.engine`) on a model folder; the caller closes it.

    No prompt with its response may have more than `longest` tokens.
    """
    return _GENERATORS[engine](model, dtype, execution, longest)


@dataclass(slots=True)
class ResponseProgress:
    """Counts responses of this attempt and tells the supervisor."""

    context: StageContext
    total: int
    done: int
    correct: int = 0
    graded: int = 0
    tokens: int = 0
    began: float = field(default_factory=time.perf_counter)

    def skip(self, count: int) -> None:
        """Responses that an earlier attempt has left."""
        self.done += count

    def add(self, batch: Sequence[SampleRecord]) -> None:
        """Count a graded batch."""
        self.done += len(batch)
        self.graded += len(batch)
        self.correct += sum(record.correct for record in batch)
        self.tokens += sum(record.num_tokens for record in batch)
        speed = self.tokens / max(time.perf_counter() - self.began, 1e-9)
        self.context.events.progress(self.done, self.total, reward=self.correct / self.graded, tokens_per_s=speed)


def _embedded(model: Path, dtype: DType, execution: ExecutionConfig, longest: int) -> Generator:
    engine = TransformersEngine.from_folder(model, dtype, execution.rollout_batch_size)
    return Generator(engine, execution.rollout_batch_size)


def _vllm(model: Path, dtype: DType, execution: ExecutionConfig, longest: int) -> Generator:
    # The whole context of a model may need more KV cache than there is; all that is asked must fit, no more.
    engine = VLLMEngine.from_folder(model, execution.vllm, dtype, max_model_len=longest, reads_text=True)
    return Generator(engine, _FULL_BATCHES * execution.vllm.max_num_seqs)


def _servers(model: Path, dtype: DType, execution: ExecutionConfig, longest: int) -> Generator:
    config = execution.server
    engine = ServerEngine.from_folder(model, config, dtype, max_model_len=longest)
    return Generator(engine, _FULL_BATCHES * config.concurrency * len(config.urls))


_GENERATORS: dict[str, Callable[[Path, DType, ExecutionConfig, int], Generator]] = {
    "transformers": _embedded,
    "vllm": _vllm,
    "openai": _servers,
}

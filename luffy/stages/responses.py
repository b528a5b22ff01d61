"""Engines and progress reports for the stages that sample responses from a finished model."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from luffy.config.environment import LANES
from luffy.config.execution import ExecutionConfig
from luffy.config.model import DType, EndpointModel
from luffy.data.prompt_templates import OWN
from luffy.evaluation.sample_records import SampleRecord
from luffy.rollout.engine import SwappableEngine
from luffy.rollout.server_engine import ServerEngine
from luffy.rollout.text_answers import TextAnswers
from luffy.rollout.text_endpoint import CHAT, TEXT, TextEndpoint
from luffy.rollout.transformers_engine import TransformersEngine
from luffy.rollout.vllm_engine import VLLMEngine
from luffy.stages.program import StageContext

_FULL_BATCHES = 4
"""Batches of prompts per engine call: with continuous batching, slots are idle only at the end of a call."""


@dataclass(frozen=True, slots=True)
class Generator:
    """An engine and its best batch size."""

    engine: SwappableEngine
    batch_size: int
    """Number of prompts per call."""
    calls_at_once: int = 1
    """Number of calls that it answers at the same time."""
    lanes: int = 0
    """Number of engine calls that episodes may have in flight at once; 0: only one."""


@dataclass(frozen=True, slots=True)
class EndpointGenerator:
    """A text endpoint and its best batch size."""

    endpoint: TextEndpoint
    batch_size: int


def open_endpoint(
    model: EndpointModel, templates: Sequence[str], execution: ExecutionConfig, answers: TextAnswers
) -> EndpointGenerator:
    """Connect to a model served by an endpoint, for prompts in all of `templates`; the caller closes it.

    Raises ConfigError for an endpoint without the paths that they need.
    """
    config = execution.server
    paths = tuple(dict.fromkeys(CHAT if template == OWN else TEXT for template in templates))
    endpoint = TextEndpoint.connect(model, config, paths, answers)
    return EndpointGenerator(endpoint, _FULL_BATCHES * config.concurrency * len(config.urls))


def open_generator(engine: str, model: Path, dtype: DType, longest: int, context: StageContext) -> Generator:
    """The engine of that name (`evaluation.engine`) on a model folder; the caller closes it.

    `longest` is the largest number of tokens of a prompt with its response.
    """
    return _GENERATORS[engine](model, dtype, longest, context)


@dataclass(slots=True)
class ResponseProgress:
    """Counts the responses of this attempt and reports them to the supervisor."""

    context: StageContext
    total: int
    done: int
    correct: int = 0
    graded: int = 0
    tokens: int = 0
    began: float = field(default_factory=time.perf_counter)

    def begin(self) -> None:
        """The engine is ready: its speed is counted from here."""
        self.began, self.tokens = time.perf_counter(), 0
        self.context.events.progress(self.done, self.total)

    def skip(self, count: int) -> None:
        """Count responses from an earlier attempt."""
        self.done += count

    def add(self, batch: Sequence[SampleRecord]) -> None:
        """Count a batch that was generated and graded."""
        self.tokens += sum(record.num_tokens for record in batch)
        self.add_adopted(batch)

    def add_adopted(self, batch: Sequence[SampleRecord]) -> None:
        """Count a graded batch that an earlier evaluation generated."""
        self.done += len(batch)
        self.graded += len(batch)
        self.correct += sum(record.correct for record in batch)
        speed = self.tokens / max(time.perf_counter() - self.began, 1e-9)
        self.context.events.progress(self.done, self.total, reward=self.correct / self.graded, tokens_per_s=speed)


def _embedded(model: Path, dtype: DType, longest: int, context: StageContext) -> Generator:
    batch_size = context.execution.rollout_batch_size
    return Generator(TransformersEngine.from_folder(model, dtype, batch_size), batch_size)


def _vllm(model: Path, dtype: DType, longest: int, context: StageContext) -> Generator:
    config = context.execution.vllm
    batch_size = _FULL_BATCHES * config.max_num_seqs
    # The model's full context may need more KV cache than there is; only the longest request has to fit.
    if config.engines == 1:
        engine = VLLMEngine.from_folder(model, config, dtype, max_model_len=longest, reads_text=True)
        return Generator(engine, batch_size, lanes=LANES)
    from luffy.cluster.engine_pool import EnginePool  # imported here so that one engine needs no Ray

    pool = EnginePool(model, context.execution, dtype, max_model_len=longest, out=context.out)
    return Generator(pool, batch_size, config.engines)


def _servers(model: Path, dtype: DType, longest: int, context: StageContext) -> Generator:
    config = context.execution.server
    engine = ServerEngine.from_folder(model, config, dtype, max_model_len=longest)
    return Generator(engine, _FULL_BATCHES * config.concurrency * len(config.urls), lanes=LANES)


_GENERATORS: dict[str, Callable[[Path, DType, int, StageContext], Generator]] = {
    "transformers": _embedded,
    "vllm": _vllm,
    "openai": _servers,
}

"""The interface of rollout engines: requests in, completions out."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from luffy.types import FinishReason


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How responses are sampled; a model folder's `generation_config` is never applied."""

    temperature: float
    """0: greedy."""
    max_response_tokens: int
    """Limit of the whole response, including a given prefix."""
    stop_token_ids: tuple[int, ...]
    top_p: float = 1.0
    """Nucleus sampling: only the likeliest tokens of this total probability; RL leaves it at 1."""
    stop: tuple[str, ...] = ()
    """Texts that end a response. An engine may return tokens past the first of them; the caller truncates."""


@dataclass(frozen=True, slots=True)
class RolloutRequest:
    """One response to generate."""

    prompt_ids: tuple[int, ...]
    seed: int
    """Decides the sampled tokens, whatever else is in the batch."""
    prefix_ids: tuple[int, ...] = ()
    """Start of the response, which the engine continues (prefix-conditioned rows); not part of the completion. Shorter
    than `SamplingParams.max_response_tokens`, so that at least one token is generated."""
    max_tokens: int | None = None
    """Limit of the sampled tokens of this response alone; None: that of `SamplingParams` for all. It plays no part in
    the order in which an engine takes requests: the length of a response is not known beforehand."""


@dataclass(frozen=True, slots=True)
class Completion:
    """What was generated, as token ids."""

    token_ids: tuple[int, ...]
    """Generated tokens, the stop token included when it was sampled."""
    logprobs: tuple[float, ...]
    """Log-probability of each token under the distribution it was sampled from (temperature applied; greedy: 1)."""
    finish_reason: FinishReason
    weight_versions: tuple[int, ...]
    """For each token, the version of the weights that sampled it: their number of RL steps."""


class RolloutEngine(Protocol):
    """Generates responses with the policy's weights."""

    def generate(self, requests: Sequence[RolloutRequest], params: SamplingParams) -> list[Completion]:
        """One completion per request, in order."""
        ...

    def close(self) -> None:
        """Free what the engine holds."""
        ...


class SwappableEngine(RolloutEngine, Protocol):
    """An engine whose weights can be replaced by others of the same architecture."""

    def load_weights_from(self, folder: Path, version: int) -> None:
        """Replace all weights with those of a model folder, as `version`."""
        ...

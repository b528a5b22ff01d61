"""The seam between whoever needs text from the policy and whoever generates it."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from luffy.types import FinishReason


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How responses are drawn; nothing of a model folder's `generation_config` is ever applied."""

    temperature: float
    """0: greedy."""
    max_response_tokens: int
    """Of the whole response: a given prefix counts, and only the rest of them may be generated behind it."""
    stop_token_ids: tuple[int, ...]
    top_p: float = 1.0
    """Only the likeliest tokens that together have this probability are drawn from; RL leaves it at 1."""
    stop: tuple[str, ...] = ()
    """Texts that end a response. An engine may look for them with each token, and may as well go on: whoever asks
    cuts behind the first of them."""


@dataclass(frozen=True, slots=True)
class RolloutRequest:
    """One response to generate."""

    prompt_ids: tuple[int, ...]
    seed: int
    """Decides the draw, independently of what else is in the batch."""
    prefix_ids: tuple[int, ...] = ()
    """Start of the response that is given and continued (hybrid rows); not part of the completion. It must be shorter
    than `SamplingParams.max_response_tokens`: something is always generated."""


@dataclass(frozen=True, slots=True)
class Completion:
    """What was generated, token ids in and token ids out."""

    token_ids: tuple[int, ...]
    """Generated tokens, the stop token included when it was sampled."""
    logprobs: tuple[float, ...]
    """Log-probability of each token under the distribution it was drawn from (temperature applied; greedy: 1)."""
    finish_reason: FinishReason
    weight_versions: tuple[int, ...]
    """Of each token: the number of RL steps behind the weights that drew it."""


class RolloutEngine(Protocol):
    """Generates responses with the policy's weights."""

    def generate(self, requests: Sequence[RolloutRequest], params: SamplingParams) -> list[Completion]:
        """One completion a request, in the order of the requests."""
        ...

    def close(self) -> None:
        """Free what the engine holds."""
        ...


class SwappableEngine(RolloutEngine, Protocol):
    """One whose weights can be replaced by others of the same architecture."""

    def load_weights_from(self, folder: Path, version: int) -> None:
        """Replace all weights by those of a model folder; they become `version`."""
        ...

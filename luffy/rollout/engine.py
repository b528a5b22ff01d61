"""The interface of rollout engines, requests in and completions out, and the texts that end a response."""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
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
    max_new_tokens: int | None = None
    """Limit of the completion (one turn, or what a partial rollout may grow by), where the limit of the whole response
    leaves more. Engines do not order requests by it, since it says little about the length of a response."""
    response_in_prompt: int = 0
    """Tokens of `prompt_ids` that count towards the limit of the whole response: a context that a chat template
    rendered again contains earlier turns. Negative where that context is shorter than the first prompt."""
    shares_cache_with: str = ""
    """Requests with equal values may reuse each other's KV cache, also from earlier calls: the turns of episodes that
    are played together. Empty: only requests of the same call may."""


def room(request: RolloutRequest, params: SamplingParams) -> int:
    """Number of tokens left under the limit of the whole response, at least one."""
    written = request.response_in_prompt + len(request.prefix_ids)
    left = params.max_response_tokens - written
    assert left > 0, f"a prefix of {written} tokens leaves none of {params.max_response_tokens}"
    return left


def limit(request: RolloutRequest, params: SamplingParams) -> int:
    """Number of tokens that may be sampled for the request."""
    left = room(request, params)
    return left if request.max_new_tokens is None else min(left, request.max_new_tokens)


@dataclass(frozen=True, slots=True)
class Completion:
    """What was generated, as token ids."""

    token_ids: tuple[int, ...]
    """Generated tokens, the stop token included when it was sampled."""
    logprobs: tuple[float, ...]
    """Log-probability of each token under the distribution it was sampled from (temperature and `top_p` applied); for
    greedy tokens under the plain softmax."""
    finish_reason: FinishReason
    weight_versions: tuple[int, ...]
    """For each token, the version of the weights that sampled it: their number of RL steps."""


class RolloutEngine(Protocol):
    """Generates responses with the policy's weights."""

    def generate(self, requests: Sequence[RolloutRequest], params: SamplingParams) -> list[Completion]:
        """One completion per request, in order."""


class SwappableEngine(RolloutEngine, Protocol):
    """An engine of its own, whose weights can be replaced by others of the same architecture."""

    def load_weights_from(self, folder: Path, version: int) -> None:
        """Replace all weights with those of a model folder, as `version`.

        The folder has to stay until the next call or `close`.
        """

    def close(self) -> None:
        """Free what the engine holds."""


@dataclass(frozen=True, slots=True)
class StopTexts:
    """Texts that end a response, besides the stop tokens.

        stops = StopTexts(("</answer>",), decode)
        text, num_tokens = stops.read(token_ids)

    An engine may return tokens past the first stop text, or miss one that begins in a given prefix; what is kept is
    decided here, for evaluations and for RL.
    """

    texts: tuple[str, ...]
    decode: Callable[[Sequence[int]], str]
    """How token ids become the text in which they are looked for."""

    def text(self, token_ids: Sequence[int]) -> str:
        """The text up to and including the first stop text."""
        whole = self.decode(token_ids)
        return whole[: end_of_first(whole, self.texts)]

    def read(self, token_ids: Sequence[int]) -> tuple[str, int | None]:
        """The same text, and how many tokens complete the stop text; None without one."""
        whole, count = self.decode(token_ids), len(token_ids)
        end = end_of_first(whole, self.texts)
        if end is None:
            return whole, None
        if not self._has_stop(token_ids[:-1]):  # an engine has stopped here
            return whole[:end], count
        return whole[:end], 1 + bisect_left(range(1, count), True, key=lambda n: self._has_stop(token_ids[:n]))

    def cut(self, completion: Completion, given_ids: tuple[int, ...] = ()) -> Completion:
        """The completion up to the token that completes the first stop text of the response.

        `given_ids`, with which the response begins, hold no whole stop text (`before_first`).
        """
        if not self.texts:
            return completion
        _, num_tokens = self.read(given_ids + completion.token_ids)
        if num_tokens is None:
            return completion
        end = num_tokens - len(given_ids)
        assert end > 0, "a prefix holds a stop text"
        return replace(
            completion,
            token_ids=completion.token_ids[:end],
            logprobs=completion.logprobs[:end],
            weight_versions=completion.weight_versions[:end],
            finish_reason=FinishReason.STOP,
        )

    def before_first(self, token_ids: Sequence[int]) -> int:
        """How many of the tokens come before the one that completes the first stop text; all of them without one."""
        num_tokens = self.read(token_ids)[1] if self.texts else None
        return len(token_ids) if num_tokens is None else num_tokens - 1

    def _has_stop(self, token_ids: Sequence[int]) -> bool:
        return end_of_first(self.decode(token_ids), self.texts) is not None


def end_of_first(text: str, stops: Sequence[str]) -> int | None:
    """Where the first stop text in `text` ends; None without one."""
    ends = [start + len(stop) for stop in stops if (start := text.find(stop)) >= 0]
    return min(ends, default=None)

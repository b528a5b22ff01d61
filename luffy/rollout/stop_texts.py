"""Texts that end a response, besides the stop tokens.

    stops = StopTexts(("</answer>",), decode)
    text, num_tokens = stops.read(token_ids)

An engine may return tokens past the first stop text, or miss one that begins in a given prefix; what is kept is decided
here, for evaluations and for RL.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from luffy.rollout.engine import Completion
from luffy.types import FinishReason


@dataclass(frozen=True, slots=True)
class StopTexts:
    """The texts, and how token ids become the text in which they are looked for."""

    texts: tuple[str, ...]
    decode: Callable[[Sequence[int]], str]

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
        return whole[:end], _fewest(count - 1, lambda n: self._has_stop(token_ids[:n]))

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


def _fewest(most: int, holds: Callable[[int], bool]) -> int:
    """Binary search: the least n in 1..most with `holds(n)`, where `holds(most)` is true and `holds` is monotone."""
    low, high = 1, most
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle + 1, high)
    return low

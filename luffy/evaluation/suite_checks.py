"""Checks that a suite can be evaluated whole: a part of it would be another benchmark under the same name."""

from collections.abc import Callable, Sequence
from typing import TypeVar

from transformers import PreTrainedTokenizerBase

from luffy.data.prompt_templates import OWN, ask
from luffy.errors import DataError
from luffy.evaluation.requests import Suite
from luffy.types import Prompt

_Rendered = TypeVar("_Rendered")


def check_suite(
    suite: Suite,
    tokenizer: PreTrainedTokenizerBase,
    max_response_tokens: int,
    context_length: int | None,
    template: str = OWN,
) -> int:
    """Return the number of tokens of the longest prompt; `context_length` is None for a model without a stated limit.

    Raises DataError as `check_problems`, and if a prompt leaves no space for `max_response_tokens`.
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

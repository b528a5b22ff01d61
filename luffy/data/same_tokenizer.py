"""Whether two models have the same tokenizer, so that one can score the other's tokens."""

import json

from transformers import PreTrainedTokenizerBase

from luffy.data.templates import stop_token_ids


def is_same_tokenizer(one: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase) -> bool:
    """Whether two tokenizers give every text the same ids and end it with the same token."""
    ends_alike = stop_token_ids(one) == stop_token_ids(other)
    return ends_alike and _rules(one) == _rules(other)


def _rules(tokenizer: PreTrainedTokenizerBase) -> object:
    """How a tokenizer cuts text, without the padding and truncation that calls may leave switched on."""
    rules = json.loads(tokenizer.backend_tokenizer.to_str())
    return {name: value for name, value in rules.items() if name not in ("padding", "truncation", "post_processor")}

"""Whether two models have the same tokenizer, so that one can score the other's tokens."""

import json

from transformers import PreTrainedTokenizerBase


def is_same_tokenizer(one: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase) -> bool:
    """Whether two tokenizers give every text the same ids and have the same end of sequence.

    Tokens that only one of them has at the end of its vocabulary, such as padding, are no difference.
    """
    shared = min(len(one), len(other))
    return one.eos_token_id == other.eos_token_id and _rules(one, shared) == _rules(other, shared)


def _rules(tokenizer: PreTrainedTokenizerBase, shared: int) -> object:
    """How a tokenizer cuts text, without the padding and truncation that calls may leave switched on."""
    rules = json.loads(tokenizer.backend_tokenizer.to_str())
    rules["added_tokens"] = [token for token in rules["added_tokens"] if token["id"] < shared]
    return {name: value for name, value in rules.items() if name not in ("padding", "truncation", "post_processor")}

"""The identity of prompts and sources."""

import hashlib
from collections.abc import Sequence

from luffy.types import Message

_UID_LENGTH = 16


def prompt_uid(data_source: str, messages: Sequence[Message]) -> str:
    """Return 16 hexadecimal digits of the sha256 of the data source and the problem (all but the system prompt)."""
    parts = [data_source]
    for message in _problem(messages):
        parts += (message.role, message.content)
    # Lengths in front keep ("ab", "c") apart from ("a", "bc").
    text = "".join([f"{len(part)}:{part}" for part in parts])
    return hashlib.sha256(text.encode()).hexdigest()[:_UID_LENGTH]


def problem_key(messages: Sequence[Message]) -> str:
    """Return a key that is equal for equal problems: the turns without the system prompt, case and spacing."""
    return text_key(" ".join(message.content for message in _problem(messages)))


def text_key(text: str) -> str:
    """Return the text without case and spacing."""
    return " ".join(text.split()).casefold()


def problem_text(messages: Sequence[Message]) -> str:
    """Return the question as written: the turns without the system prompt, one per line."""
    return "\n".join(message.content for message in _problem(messages))


def _problem(messages: Sequence[Message]) -> Sequence[Message]:
    """The turns that state the problem: all but system messages, unless there are no others."""
    return [message for message in messages if message.role != "system"] or messages

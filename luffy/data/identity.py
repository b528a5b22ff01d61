"""The identity of prompts and sources."""

import hashlib
from collections.abc import Sequence

from luffy.types import Message

_UID_LENGTH = 16


def prompt_uid(data_source: str, messages: Sequence[Message]) -> str:
    """Return 16 hexadecimal digits of the sha256 of the data source and the messages."""
    parts = [data_source]
    for message in messages:
        parts += (message.role, message.content)
    # Lengths in front keep ("ab", "c") apart from ("a", "bc").
    text = "".join([f"{len(part)}:{part}" for part in parts])
    return hashlib.sha256(text.encode()).hexdigest()[:_UID_LENGTH]


def problem_key(messages: Sequence[Message]) -> str:
    """Return what two wordings of one problem share: the turns without the system prompt, case and spacing."""
    turns = " ".join(message.content for message in messages if message.role != "system")
    return " ".join(turns.split()).casefold()

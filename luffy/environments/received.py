"""Checks of what environments and measures return: messages and numbers.

An environment may be anyone's class. A mistake in what it returns raises a TypeError that names the method, and so ends
its own episode as `crashed`, before a tokenizer or a file meets it.
"""

import math
import re
from collections.abc import Mapping, Sequence
from numbers import Real

import numpy as np

from luffy.types import Message

_POLICY = "assistant"
_UNWRITABLE = re.compile("[\x00\ud800-\udfff]")
_MESSAGES = "a list of messages, each a luffy.types.Message or a mapping with role and content"


def writable(text: str) -> str:
    """The text with a replacement character for each one that a tokenizer or a file may not take."""
    return _UNWRITABLE.sub("\ufffd", text)


def received_messages(method: str, found: object) -> list[Message]:
    """The messages that a method of an environment returned; mappings become messages, as verifiers writes them."""
    if isinstance(found, str) or not isinstance(found, Sequence):
        raise TypeError(f"{method} returned {found!r:.80}, and has to return {_MESSAGES}")
    return [_message(method, each) for each in found]


def received_counts(found: object) -> dict[str, float]:
    """The numbers that `counts` returned, by name."""
    if not isinstance(found, Mapping):
        raise TypeError(f"counts returned {found!r:.80}, and has to return numbers by name")
    return {str(name): finite_number(f"count {name}", value) for name, value in found.items()}


def finite_number(name: str, found: object) -> float:
    """The number in Python's own type, also where it is one of numpy's; TypeError where it is no finite number."""
    value = found.item() if isinstance(found, np.generic) else found
    if not isinstance(value, Real) or not math.isfinite(value):
        raise TypeError(f"{name} is {found!r:.80}, which is no finite number")
    return float(value)


def _message(method: str, found: object) -> Message:
    fields = {"role": found.role, "content": found.content} if isinstance(found, Message) else found
    if not isinstance(fields, Mapping):
        raise TypeError(f"{method} returned {found!r:.80} among its messages, and has to return {_MESSAGES}")
    role, content = fields.get("role"), fields.get("content")
    if not isinstance(role, str) or not isinstance(content, str):
        raise TypeError(f"{method} returned the message {found!r:.80}, whose role and content have to be text")
    if role == _POLICY:
        raise TypeError(f"{method} returned a message of the role {_POLICY}, which is the policy's own")
    return Message(role, writable(content))

"""Multiple-choice questions: how options are written into the problem, and in which order.

    What is a prime?

    A. 8
    B. 7

The options themselves are kept in `extra_info.options`, their number in `extra_info.num_options`: a score adjusted for
guessing needs it.
"""

import dataclasses
import hashlib
from collections.abc import Sequence

from luffy.data.schema import problem_text
from luffy.types import Message, Prompt

LABELS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
OPTIONS, NUM_OPTIONS = "options", "num_options"


def with_options(messages: Sequence[Message], options: Sequence[str]) -> tuple[Message, ...]:
    """Return the conversation with the options below its last turn."""
    last = messages[-1]
    return (*messages[:-1], dataclasses.replace(last, content=last.content.rstrip() + _block(options)))


def without_options(prompt: Prompt) -> str:
    """Return the question of a prompt, without its options."""
    text, options = problem_text(prompt.messages), prompt.extra_info.get(OPTIONS)
    if not isinstance(options, list):
        return text
    return text.removesuffix(_block([str(option) for option in options]))


def fixed_order(question: str, options: Sequence[str]) -> list[str]:
    """Return the options ordered by a hash of each with its question, independent of their order in the source."""
    return sorted(options, key=lambda option: hashlib.sha256(f"{len(question)}:{question}{option}".encode()).digest())


def _block(options: Sequence[str]) -> str:
    lines = [f"{label}. {option}" for label, option in zip(LABELS, options, strict=False)]
    return "\n\n" + "\n".join(lines)

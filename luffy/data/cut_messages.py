"""Long messages of an environment, cut in the middle.

shown = cut(start, 120, "tokens", end)      # "... [120 tokens left out] ..." between them
is_cut_from(shown, whole)                   # whether it may be `whole` after a cut

A policy sees the cut message, so the conversation, and any trace made from it, holds the cut text.
"""

import re
import unicodedata

_MARK = " ... [{count} {unit} left out] ... "
_MARKED = re.compile(r"(?=(\.\.\. \[\d+ \w+ left out\] \.\.\.))")
"""Finds marks that overlap, too: a message that was cut may have shown one itself."""
_BROKEN = "\ufffd"
"""What is decoded from the part of a character on one side of a cut between tokens."""


def cut(start: str, count: int, unit: str, end: str) -> str:
    """`start` and `end` of a message with a mark between them, which says how many tokens or characters are missing."""
    return start + _MARK.format(count=count, unit=unit) + end


def is_cut_from(shown: str, whole: str) -> bool:
    """Whether `shown` is `whole` without its middle. White space and Unicode forms, which decoding may change, are not
    compared."""
    composed = (unicodedata.normalize("NFC", text) for text in (shown, whole))
    return _is_cut_from(shown, whole) or _is_cut_from(*composed)


def _is_cut_from(shown: str, whole: str) -> bool:
    text = _without_space(whole)
    for mark in _MARKED.finditer(shown):
        start = _without_space(shown[: mark.start(1)]).rstrip(_BROKEN)
        end = _without_space(shown[mark.end(1) :]).lstrip(_BROKEN)
        if text.startswith(start) and text[len(start) :].endswith(end):
            return True
    return False


def _without_space(text: str) -> str:
    return "".join(text.split())

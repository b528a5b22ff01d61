"""JSON written by others: its nesting is counted before Python's parser, which recurses, sees it."""

import json
import re
from typing import Any

MAX_DEPTH = 100
"""Deepest nesting that is read, in JSON and YAML. A parser that recurses exhausts Python's stack after a thousand
levels, and a parser in C the process's after some ten thousand."""
_STRING_OR_BRACKET = re.compile(r'"(?:[^"\\]++|\\.)*+"?|[][{}]', re.DOTALL)


class NestedTooDeep(ValueError):
    """A text nests deeper than `MAX_DEPTH`."""

    def __init__(self, depth: int) -> None:
        super().__init__(f"it is nested too deep: {depth} levels, at most {MAX_DEPTH} are read")


def refuse_deep(text: str, start: int = 0) -> None:
    """Raise NestedTooDeep where the JSON value at `start` nests deeper than `MAX_DEPTH`; one loop over its brackets."""
    if text.count("[", start) + text.count("{", start) <= MAX_DEPTH:
        return
    depth = deepest = 0
    for found in _STRING_OR_BRACKET.finditer(text, start):
        if found[0] in ("[", "{"):
            depth += 1
            deepest = max(deepest, depth)
        elif found[0] in ("]", "}"):
            depth -= 1
            if depth <= 0:
                break  # the value ends here, and with it what a parser reads
    if deepest > MAX_DEPTH:
        raise NestedTooDeep(deepest)


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON text; ValueError where it is none, or nests too deep."""
    if isinstance(text, bytes):
        text = text.decode(json.detect_encoding(text), "surrogatepass")
    refuse_deep(text)
    return json.loads(text)

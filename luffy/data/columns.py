"""Access to the values of a row by column name."""

import ast
import io
import itertools
import math
import tokenize
from collections.abc import Mapping


def value_at(row: Mapping[str, object], column: str) -> object:
    """Return the value of a column, None if there is none; `a.b` reaches into a mapping."""
    value: object = row
    for part in column.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def as_text(value: object) -> object:
    """Return a number as text (`27.0` as "27"), None for NaN (a missing cell), anything else unchanged."""
    if isinstance(value, float) and math.isnan(value):
        return None
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


def as_list(value: object) -> list[object] | None:
    """Return a list, which may be written as text (`['2', '3']`); None for anything else.

    NumPy's `['2' '3']`, which pandas writes to CSV, is none: to Python it is one text, `23`.
    """
    found = _literal(value) if isinstance(value, str) else value
    return list(found) if isinstance(found, list | tuple) else None


def _literal(text: str) -> object:
    try:
        found = ast.literal_eval(text)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return None
    return None if _holds_adjacent_texts(text) else found


def _holds_adjacent_texts(literal: str) -> bool:
    tokens = tokenize.generate_tokens(io.StringIO(literal).readline)
    types = [token.type for token in tokens if token.type != tokenize.NL]
    return (tokenize.STRING, tokenize.STRING) in itertools.pairwise(types)

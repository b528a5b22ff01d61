"""Paths of keys in nested YAML values, such as `("objective", "terms", "1")`, written `objective.terms.off_policy`.

An element of a list of mappings goes by its `name`; one without a name goes by its index.
"""

import difflib
from collections.abc import Iterator

from luffy.config.yaml_source import KeyPath, Value
from luffy.errors import ConfigError


def key_paths(value: Value, above: KeyPath = ()) -> Iterator[KeyPath]:
    """Path of every key and list element below `value`, parents first."""
    below = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in below:
        yield (*above, str(key))
        yield from key_paths(part, (*above, str(key)))


def child(value: Value, key: str) -> Value:
    """The value below `key` in a mapping, or at that index in a list; None where there is none.

    A key of a mapping may be a number, as in `stepwise_share: {1: 0.5}`, and is compared as text.
    """
    if isinstance(value, dict):
        return next((below for name, below in value.items() if str(name) == key), None)
    if isinstance(value, list) and key.isdecimal() and int(key) < len(value):
        return value[int(key)]
    return None


def dotted(path: KeyPath, values: Value) -> str:
    """`path` as a user writes it: elements of lists in `values` by name, where they have one."""
    words = []
    for key in path:
        below = child(values, key)
        name = below.get("name") if isinstance(values, list) and isinstance(below, dict) else None
        words.append(name if isinstance(name, str) else key)
        values = below
    return ".".join(words)


def element_index(elements: list[Value], key: str, where: str) -> int:
    """Index of the element that `key` names; ConfigError, which begins with `where`, where there is none."""
    names = [element.get("name") if isinstance(element, dict) else None for element in elements]
    if key in names:
        return names.index(key)
    if key.isdecimal() and int(key) < len(elements):
        return int(key)
    allowed = [str(index) if name is None else str(name) for index, name in enumerate(names)]
    close = difflib.get_close_matches(key, allowed, n=1, cutoff=0.5)
    nearest = f"did you mean {close[0]!r}? " if close else ""
    raise ConfigError(f"{where}: no element {key!r} in this list; {nearest}there are {', '.join(allowed) or 'none'}")

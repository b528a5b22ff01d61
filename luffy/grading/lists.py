r"""Equality of two lists of items: matched by name, by position, or in any order.

Items with names of their own are matched by name (`w = 16, d = 3`), or by place where the other side has no names.
So are items with nouns ("7 goats and 4 helicopters"). Solutions of one unknown, sets and plain lists have no order.
`\pm` stands for two items; a tuple is its components in order.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from luffy.grading.naming import bare, called, differ, one_range, same_items
from luffy.grading.statement import Item, Statement, top_level
from luffy.grading.units import canonical_unit
from luffy.grading.values import Compound, expansions, matched, value

MAX_ITEMS = 64
_INDEX = re.compile(r"(?<=[A-Za-z}])_?\{?[0-9]+\}?$|'+$")
_POINT = re.compile(r"(?P<name>[A-Z](?:_\{?[0-9]\}?|')?)\s*(?P<place>\(.+,.+\))", re.DOTALL)
"""A point with its coordinates: `A(1, 2)`."""
_IN_SET = re.compile(r"[^=<>{}]{1,40}\\in\s*(?P<set>\\\{.+\\\})", re.DOTALL)
Items = Sequence[Item]
_NOUNS, _LABELS = "noun", "label"


def same_statements(left: Statement, right: Statement) -> bool:
    """Whether two statements list the same items."""
    domains = left.domains, right.domains
    if not one_range(*domains):
        return False

    def equal(one: Item, other: Item) -> bool:
        return same_items(one, other, domains)

    return any(
        _same_lists(*_balanced(one, other), equal) for one in _readings(left.items) for other in _readings(right.items)
    )


def contradict(left: Statement, right: Statement) -> bool:
    """Whether items that are matched by name, noun or position certainly differ."""
    one, other = _balanced(next(_readings(left.items), []), next(_readings(right.items), []))
    if len(one) != len(other):
        return False
    if len(one) == 1:
        return (one[0].scale != other[0].scale or _has_unit(one[0], other[0])) and differ(one[0], other[0])
    pairs = _paired(one, other)
    return pairs is not None and any(differ(mine, yours) for mine, yours in pairs)


def _grouped(items: Items) -> Items:
    """Items whose names repeat, grouped into tuples: `x = 1, y = 2` or `x = 2, y = 1`."""
    labels = [item.label for item in items]
    if labels and labels[0] and labels.count(labels[0]) > 1:
        size = labels.index(labels[0], 1)
        if size > 1 and len(set(labels[:size])) == size and labels == labels[:size] * (len(labels) // size):
            starts = range(0, len(items), size)
            return [Item(f"({','.join(item.body for item in items[at : at + size])})") for at in starts]
    return items


def _balanced(left: list[Item], right: list[Item]) -> tuple[Items, Items]:
    """Both lists, a tuple alone on one side as its components where the other side names each of as many items."""
    for one, other, swap in ((left, right, False), (right, left, True)):
        parts = _components(one[0]) if len(one) == 1 else None
        if parts is not None and len(parts) == len(other) and _keys(other, _LABELS):
            named = [Item(part) for part in parts]
            return (other, named) if swap else (named, other)
    return left, right


def _components(item: Item) -> list[str] | None:
    """The texts of a tuple's parts; None for anything else."""
    found = value(item.body)
    return (
        top_level(item.body[1:-1], ",")
        if isinstance(found, Compound) and found.kind == "()" and item.body[0] == "("
        else None
    )


def _point(item: Item) -> Item:
    match = None if item.label else _POINT.fullmatch(item.body)
    return item if match is None else replace(item, label=match["name"], body=match["place"])


def _has_unit(left: Item, right: Item) -> bool:
    return bool(left.noun and right.noun)


def _same_lists(left: Items, right: Items, equal: Callable[[Item, Item], bool]) -> bool:
    if len(left) != len(right):
        return False
    pairs = _paired(left, right)
    if pairs is not None:
        return all(equal(mine, yours) for mine, yours in pairs)
    return matched(left, right, equal)


def _paired(left: Items, right: Items) -> list[tuple[Item, Item]] | None:
    """The items that belong together; None where names, nouns and brackets leave the order open."""
    if len(left) == 1:
        return [(left[0], right[0])]
    for kind in (_LABELS, _NOUNS):
        mine, yours = _keys(left, kind), _keys(right, kind)
        if mine and yours and set(mine) == set(yours):
            partners = dict(zip(yours, right, strict=True))
            return [(item, partners[key]) for key, item in zip(mine, left, strict=True)]
        if (mine and not _any_keys(right, kind)) or (yours and not _any_keys(left, kind)):
            return [(bare(one), bare(other)) for one, other in zip(left, right, strict=True)]
    return None


def _keys(items: Items, kind: str) -> list[object]:
    """A key of each item, where the keys are distinct; the roots `x_1, x_2` belong to one unknown."""
    if kind == _NOUNS:
        keys: list[object] = [canonical_unit(item.noun) for item in items]
        return keys if len(set(keys)) == len(keys) and all(item.noun for item in items) else []
    labels = [called(item.label) for item in items]
    stems = {_INDEX.sub("", label) for label in labels}
    return list(labels) if "" not in stems and len(set(labels)) == len(labels) and len(stems) > 1 else []


def _any_keys(items: Items, kind: str) -> bool:
    return any(item.noun if kind == _NOUNS else item.label for item in items)


def _readings(items: Items) -> Iterator[list[Item]]:
    """The lists that one may be read as: sets and named tuples opened, the signs of `\\pm` together or each free.

    An empty set has no reading.
    """
    opened = _opened(items)
    choices = [expansions(item.body) for item in opened]
    for index in range(max(map(len, choices), default=0)):
        texts = [choice[min(index, len(choice) - 1)] for choice in choices]
        read = [replace(item, body=body) for item, bodies in zip(opened, texts, strict=True) for body in bodies]
        if index == 0 or len(read) <= MAX_ITEMS:
            yield read


def _opened(items: Items) -> list[Item]:
    items = _grouped(items)
    if len(items) != 1:
        return [bare(item) if item.label.startswith("(") else _point(item) for item in items]
    item = _point(items[0])
    member = _IN_SET.fullmatch(item.body)
    body = member["set"] if member is not None else item.body
    names = top_level(item.label[1:-1], ",") if item.label.startswith("(") and item.label.endswith(")") else []
    if body.startswith("\\{") and body.endswith("\\}"):
        return [replace(item, body=part, label="") for part in top_level(body[2:-2], ",") if part]
    parts = _components(item) or []
    if len(names) == len(parts) > 1:
        return [Item(part, name) for part, name in zip(parts, names, strict=True)]
    return [item]

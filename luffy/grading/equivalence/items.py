r"""Equality of items with names, and of lists of them.

A name on only one side is ignored (`m_{\max} = n^2 - n - 1`). A function's bound variable may have any name that its
definition does not use otherwise, a declared parameter any name at all. Items with two names are compared as equations,
which may be multiplied by a constant.

In a list, items with names of their own are matched by name (`w = 16, d = 3`), or by place where the other side has no
names. So are items with nouns ("7 goats and 4 helicopters"). Solutions of one unknown, sets and plain lists have no
order. `\pm` stands for two items; a tuple is its components in order.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product

from luffy.grading.equivalence.expression import Apply, Expression, Variable, read_or_none, substituted, variables
from luffy.grading.equivalence.numeric import proportional, same
from luffy.grading.equivalence.statement import Item, Statement, top_level
from luffy.grading.equivalence.text import canonical_unit, compact, units_differ
from luffy.grading.equivalence.values import (
    Compound,
    Value,
    are_apart,
    expansions,
    is_constant,
    matched,
    same_values,
    scaled,
    size_of,
    value,
)

_FUNCTION = re.compile(
    r"(?P<head>\\?[A-Za-z]+(?:_\{?[A-Za-z0-9]+\}?)?)\s*\((?P<bound>[A-Za-z](?:\s*,\s*[A-Za-z]){0,3})\)"
)
_SEQUENCE = re.compile(r"(?P<head>[A-Za-z])_\{?(?P<bound>[a-z])\}?")
_EXTREMES = {"max": "maximum largest greatest highest biggest", "min": "minimum smallest least lowest"}
_SHORT = {word: short for short, words in _EXTREMES.items() for word in words.split()}
_IDLE = frozenset(("the", "value", "of", "is", "a", "answer"))
_PROSE = re.compile(r"(?<![A-Za-z\\])[A-Za-z]{3,}")
Domains = Mapping[str, str]


def same_items(left: Item, right: Item, domains: tuple[Domains, Domains] = ({}, {})) -> bool:
    """Whether two items are equal."""
    if units_differ(left.noun, right.noun):
        return False
    mine, yours = definition(left.label), definition(right.label)
    if mine and yours:
        (name, bound), (other_name, others) = mine, yours
        if name != other_name or len(bound) != len(others):
            return False
        one, two = read_or_none(left.body), read_or_none(right.body)
        if one is None or two is None:
            return bound == others and same_values(value(left.body), value(right.body))
        places = [Variable(f"#{index}") for index in range(len(bound))]  # names for the variables that no text has
        one, two = (
            substituted(body, dict(zip(names, places, strict=True))) for body, names in ((one, bound), (two, others))
        )
        return _same_but_for_parameter(one, two, domains)
    for function, item, other in ((mine, left, right), (yours, right, left)):
        if function and not other.label:
            if _same_bodies(left, right, domains):
                return True
            # A bare expression in one variable may be the definition of a function of one variable.
            bound, one, two = function[1], read_or_none(item.body), read_or_none(other.body)
            if one is None or two is None or len(bound) != 1 or variables(one) != set(bound):
                return False
            names = variables(two)
            return len(names) == 1 and same(one, substituted(two, dict.fromkeys(names, Variable(bound[0]))))
    if called(left.label) == called(right.label) or not left.label or not right.label or _is_words(left, right):
        return not _is_equation(left, right) and _same_bodies(left, right, domains)
    sides = [read_or_none(f"{item.label} - ({item.body})") for item in (left, right)]
    return sides[0] is not None and sides[1] is not None and proportional(sides[0], sides[1])


def differ(left: Item, right: Item) -> bool:
    """Whether two items certainly differ: in their units, or as constants that no rounding makes equal."""
    return units_differ(left.noun, right.noun) or are_apart(_amount(left), _amount(right))


def _amount(item: Item) -> Value:
    return scaled(item.body, item.scale)


def _is_equation(answer: Item, reference: Item) -> bool:
    """Whether one item is an equation in variables, and the other only one side of it.

    The reference counts as such an equation where it gives a value to an expression (`2x + z = 1` for `1`), the answer
    where the value is zero.
    """
    if not reference.label and answer.label:
        return answer.body.strip() == "0" and _is_compound(answer.label)
    return bool(reference.label) and not answer.label and _is_compound(reference.label)


def _is_compound(label: str) -> bool:
    """Whether a label is an expression that is computed from variables, and so not a name."""
    expression = read_or_none(label)
    return isinstance(expression, Apply) and expression.operation in ("+", "-", "*", "^") and not label.isupper()


def called(label: str) -> str:
    """A label in the form that is compared: `maximum value` becomes `\\max`."""
    plain = label.replace("\\", " ").lower().split()
    kept = [_SHORT.get(word, word) for word in plain if word not in _IDLE]
    return compact(" ".join(kept)) if kept else compact(label)


def _is_words(left: Item, right: Item) -> bool:
    """Whether words name one item and a symbol the other, as in "the value of k" and `k`."""
    prose = [_PROSE.search(item.label) is not None for item in (left, right)]
    extremes = [set(re.findall("max|min", called(item.label))) for item in (left, right)]
    return prose[0] != prose[1] and (extremes[0] == extremes[1] or not all(extremes))


def definition(label: str) -> tuple[str, tuple[str, ...]] | None:
    """The name and the bound variables of `f(x)`, or of a sequence `a_n`; None for any other label."""
    match = _FUNCTION.fullmatch(label) or _SEQUENCE.fullmatch(label)
    if match is None:
        return None
    bound = tuple(re.findall(r"[A-Za-z]", match["bound"]))
    return (match["head"], bound) if len(set(bound)) == len(bound) else None


def _same_bodies(left: Item, right: Item, domains: tuple[Domains, Domains]) -> bool:
    mine, yours = (scaled(item.body, item.scale) for item in (left, right))
    return same_values(mine, yours, lambda one, other: _same_but_for_parameter(one, other, domains))


def _same_but_for_parameter(left: Expression, right: Expression, domains: tuple[Domains, Domains]) -> bool:
    """Whether two expressions are equal, or are once a declared parameter of one has the name it has in the other."""
    names = variables(left), variables(right)
    if names[0] == names[1]:
        return same(left, right)
    mine, other = names[0] - names[1], names[1] - names[0]
    if len(mine) != 1 or len(other) != 1:
        return False
    (one,), (two,) = mine, other
    ranges = domains[0].get(one, ""), domains[1].get(two, "")
    if not any(ranges) or (all(ranges) and not _one_range(*ranges)):
        return False
    return same(left, substituted(right, {two: Variable(one)}))


def _one_range(left: str, right: str) -> bool:
    """Whether two ranges are the same; a constant without a stated range is a real number."""
    free = {"const", "R", "C"}
    return left == right or {left, right} <= free


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
    if not all(_one_range(domains[0][name], domains[1][name]) for name in domains[0].keys() & domains[1].keys()):
        return False

    def equal(one: Item, other: Item) -> bool:
        return same_items(one, other, domains)

    for one, other in product(_readings(left.items), _readings(right.items)):
        mine, yours = _balanced(one, other)
        if len(mine) == len(yours):
            pairs = _paired(mine, yours)
            if matched(mine, yours, equal) if pairs is None else all(equal(*pair) for pair in pairs):
                return True
    return False


def contradict(left: Statement, right: Statement) -> bool:
    """Whether two statements certainly differ in every reading: in items that belong together, or in their numbers."""
    readings = [_balanced(one, other) for one, other in product(_readings(left.items), _readings(right.items))]
    return bool(readings) and all(_items_contradict(*reading) for reading in readings)


def _items_contradict(left: Items, right: Items) -> bool:
    if len(left) == len(right) == 1:
        is_name = not right[0].label and not isinstance(read_or_none(left[0].label), Apply)
        are_comparable = is_name or called(left[0].label) in ("", called(right[0].label))
        return are_comparable and differ(left[0], right[0])
    if len(left) == len(right) and (pairs := _paired(left, right)) is not None:
        return any(differ(mine, yours) for mine, yours in pairs)
    mine, yours = ([_amount(item) for item in items] for items in (left, right))
    if not all(map(is_constant, (*mine, *yours))):
        return False

    def agree(one: Value, other: Value) -> bool:
        return not are_apart(one, other)

    different = _distinct(yours, agree)
    # Otherwise the reference means its repetitions, or the answer names what it counts.
    if len(different) == len(yours) and not any(item.noun for item in left):
        mine = _distinct(mine, agree)
    return not matched(mine, yours, agree)


def _distinct(values: Sequence[Value], agree: Callable[[Value, Value], bool]) -> list[Value]:
    kept: list[Value] = []
    for found in values:
        if not any(agree(found, known) for known in kept):
            kept.append(found)
    return kept


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
    is_tuple = isinstance(found, Compound) and found.kind == "()" and item.body[0] == "("
    return top_level(item.body[1:-1], ",") if is_tuple else None


def _point(item: Item) -> Item:
    match = None if item.label else _POINT.fullmatch(item.body)
    return item if match is None else replace(item, label=match["name"], body=match["place"])


def _paired(left: Items, right: Items) -> list[tuple[Item, Item]] | None:
    """The items that belong together; None where names, nouns and brackets leave the order open."""
    if len(left) == 1:
        return [(left[0], right[0])]
    for kind in (_LABELS, _NOUNS):
        mine, yours = _keys(left, kind), _keys(right, kind)
        if mine and yours and (kind == _NOUNS or set(mine) == set(yours)):  # other nouns go by place
            partners = dict(zip(yours, right, strict=True))
            rest = iter([partner for key, partner in partners.items() if key not in mine])
            return [
                (item, partners[key] if key in partners else next(rest)) for key, item in zip(mine, left, strict=True)
            ]
        some, others = ([item.noun if kind == _NOUNS else item.label for item in items] for items in (left, right))
        if (mine and not any(others)) or (yours and not any(some)):
            one, other = ([replace(item, label="") for item in items] for items in (left, right))
            if _are_extremes(mine or yours):
                one, other = (_descending(items, keys) for items, keys in ((one, mine), (other, yours)))
            return list(zip(one, other, strict=True))
    return None


def _are_extremes(keys: list[object]) -> bool:
    """Whether two labels are a maximum and a minimum of the same."""
    largest, smallest = (sorted(map(str, keys)) * 2)[:2]
    return len(keys) == 2 and largest.startswith("max") and smallest == f"min{largest[3:]}"


def _descending(items: list[Item], keys: list[object]) -> list[Item]:
    """Maximum and minimum by their names, two numbers without names by their size; as they are if they are none."""
    if keys:
        return items if str(keys[0]).startswith("max") else items[::-1]
    first, second = (size_of(_amount(item)) for item in items)
    return items[::-1] if first is not None and second is not None and first < second else items


def _keys(items: Items, kind: str) -> list[object]:
    """A key of each item, where the keys are distinct; the roots `x_1, x_2` belong to one unknown."""
    if kind == _NOUNS:
        keys: list[object] = [canonical_unit(item.noun) for item in items]
        return keys if len(set(keys)) == len(keys) and all(item.noun for item in items) else []
    labels = [called(item.label) for item in items]
    stems = {_INDEX.sub("", label) for label in labels}
    return list(labels) if "" not in stems and len(set(labels)) == len(labels) and len(stems) > 1 else []


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
    labels = [item.label for item in items]
    if labels and labels[0] and labels.count(labels[0]) > 1:  # `x = 1, y = 2` or `x = 2, y = 1`: pairs
        size = labels.index(labels[0], 1)
        if size > 1 and len(set(labels[:size])) == size and labels == labels[:size] * (len(labels) // size):
            starts = range(0, len(items), size)
            items = [Item(f"({','.join(item.body for item in items[at : at + size])})") for at in starts]
    if len(items) != 1:
        return [replace(item, label="") if item.label.startswith("(") else _point(item) for item in items]
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

r"""Equality of two items with names: named quantities, functions and equations.

A name on only one side is ignored (`m_{\max} = n^2 - n - 1`). A function's bound variable may have any name that its
definition does not use otherwise, a declared parameter any name at all. Items with two names are compared as equations,
which may be multiplied by a constant.
"""

import re
from collections.abc import Mapping
from dataclasses import replace

from luffy.grading.expression import Apply, Expression, read_or_none, renamed, variables
from luffy.grading.numeric import proportional, same
from luffy.grading.statement import Item
from luffy.grading.strict_text import compact
from luffy.grading.units import units_differ
from luffy.grading.values import Value, are_far, same_values, scaled, value

_FUNCTION = re.compile(
    r"(?P<head>\\?[A-Za-z]+(?:_\{?[A-Za-z0-9]+\}?)?)\s*\((?P<bound>[A-Za-z](?:\s*,\s*[A-Za-z]){0,3})\)"
)
_SEQUENCE = re.compile(r"(?P<head>[A-Za-z])_\{?(?P<bound>[a-z])\}?")
_SHORT = {"maximum": "max", "minimum": "min", "largest": "max", "smallest": "min"}
_IDLE = frozenset(("the", "value", "of", "is", "a", "answer"))
_PROSE = re.compile(r"(?<![A-Za-z\\])[A-Za-z]{3,}")
Domains = Mapping[str, str]


def same_items(left: Item, right: Item, domains: tuple[Domains, Domains] = ({}, {})) -> bool:
    """Whether two items are equal."""
    if units_differ(left.noun, right.noun):
        return False
    functions = definition(left.label), definition(right.label)
    if functions[0] and functions[1]:
        return functions[0][0] == functions[1][0] and _same_definitions(
            left, right, functions[0][1], functions[1][1], domains
        )
    for function, item, other in ((functions[0], left, right), (functions[1], right, left)):
        if function and not other.label:
            return _same_bodies(left, right, domains) or _same_but_for_variable(function[1], item, other)
    if called(left.label) == called(right.label) or not left.label or not right.label or _is_words(left, right):
        return not _is_equation(left, right) and _same_bodies(left, right, domains)
    return _same_equations(left, right)


def differ(left: Item, right: Item) -> bool:
    """Whether two items certainly differ: in their units, or as constants that no rounding makes equal."""
    return units_differ(left.noun, right.noun) or are_far(_value(left), _value(right))


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


def _value(item: Item) -> Value:
    return scaled(item.body, item.scale)


def _same_bodies(left: Item, right: Item, domains: tuple[Domains, Domains]) -> bool:
    return same_values(_value(left), _value(right), lambda one, other: _same_but_for_parameter(one, other, domains))


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
    return same(left, renamed(right, {two: one}))


def one_range(left: Domains, right: Domains) -> bool:
    """Whether parameters of one name on both sides range over the same."""
    return all(_one_range(left[name], right[name]) for name in left.keys() & right.keys())


def _one_range(left: str, right: str) -> bool:
    """Whether two ranges are the same; a constant without a stated range is a real number."""
    free = {"const", "R", "C"}
    return left == right or {left, right} <= free


def _same_definitions(
    left: Item, right: Item, bound: tuple[str, ...], other: tuple[str, ...], domains: tuple[Domains, Domains]
) -> bool:
    """Whether two functions are equal once their variables have the same reserved names."""
    if len(bound) != len(other):
        return False
    one, two = read_or_none(left.body), read_or_none(right.body)
    if one is None or two is None:
        return bound == other and same_values(value(left.body), value(right.body))
    places = [f"#{index}" for index in range(len(bound))]
    return _same_but_for_parameter(
        renamed(one, dict(zip(bound, places, strict=True))),
        renamed(two, dict(zip(other, places, strict=True))),
        domains,
    )


def _same_but_for_variable(bound: tuple[str, ...], function: Item, bare: Item) -> bool:
    """Whether a bare expression in one variable is the definition of a function of one variable."""
    one, other = read_or_none(function.body), read_or_none(bare.body)
    if one is None or other is None or len(bound) != 1 or variables(one) != set(bound) or len(variables(other)) != 1:
        return False
    (name,) = variables(other)
    return same(one, renamed(other, {name: bound[0]}))


def _same_equations(left: Item, right: Item) -> bool:
    sides = [read_or_none(f"{item.label} - ({item.body})") for item in (left, right)]
    return sides[0] is not None and sides[1] is not None and proportional(sides[0], sides[1])


def bare(item: Item) -> Item:
    """`item` without its name."""
    return replace(item, label="")

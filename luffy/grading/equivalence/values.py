r"""Values with brackets and their equality: numbers, expressions, tuples, sets and matrices.

A tuple keeps its order, a set does not. A column vector is the tuple of its entries, and no row. `\pm` stands for the
two values of its upper and its lower sign.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import product
from typing import SupportsFloat, TypeVar

from mpmath import mpc

from luffy.grading.equivalence.expression import (
    DEGREE,
    Apply,
    Expression,
    Number,
    Variable,
    read_or_none,
    substituted,
    variables,
)
from luffy.grading.equivalence.numeric import close, constant_value, distinct, is_decimal, rounded_decimal, same
from luffy.grading.equivalence.statement import bases, brackets, top_level
from luffy.grading.equivalence.text import (
    QUALIFIERS,
    closes_at_the_end,
    compact,
    number,
    split_noun,
    units_differ,
    words,
)

MAX_SIGNS = 4
_MATRIX = re.compile(
    r"\\begin\s*\{(?P<kind>[bpB]?(?:small)?matrix|array)\}(?:\{[lcr|]*\})?(?P<rows>.*)\\end\s*\{(?P=kind)\}",
    re.DOTALL,
)
_SIGN = re.compile(r"\\(?:pm|mp)(?![a-z])")
_MINUTES = re.compile(
    r"(?P<sign>-?)\s*(?P<degrees>[0-9]+)\s*\^\s*\{?\\circ\}?\s*(?P<minutes>[0-9]+(?:\.[0-9]+)?)\s*(?:'|\^\s*\{?\s*\\prime\s*\}?)"
    r"(?:\s*(?P<seconds>[0-9]+(?:\.[0-9]+)?)\s*(?:''|\"|'\s*'|\^\s*\{?\s*\\prime\s*\\prime\s*\}?))?"
)


@dataclass(frozen=True, slots=True)
class Compound:
    """Values in brackets: `()`, `[]`, `\\{\\}`, `column`, `row`, and half-open pairs."""

    kind: str
    parts: "tuple[Value, ...]"


@dataclass(frozen=True, slots=True)
class Scalar:
    """One expression, its text, and the noun after it."""

    text: str
    expression: Expression | None
    noun: str = ""


Value = Scalar | Compound
Element = TypeVar("Element")
Same = Callable[[Expression, Expression], bool]
"""Decides whether two expressions are equal."""


def value(text: str) -> Value:
    """The value that `text` writes down."""
    text = text.strip()
    matrix = _MATRIX.fullmatch(text)
    if matrix is not None:
        lines = re.split(r"\\\\", matrix["rows"])
        rows = [Compound("row", tuple(map(value, line.split("&")))) for line in lines if line.strip()]
        if len(rows) == 1:
            return rows[0]
        if all(len(row.parts) == 1 for row in rows):
            return Compound("column", tuple(row.parts[0] for row in rows))
        return Compound("matrix", tuple(rows))
    for opening, closing in (("\\langle", "\\rangle"), ("\\{", "\\}")):
        if text.startswith(opening) and closes_at_the_end(text, len(opening), opening, closing):
            return _compound("()" if opening == "\\langle" else "\\{\\}", text[len(opening) : -len(closing)])
    found = value(text[1:]) if text.startswith("-") else None
    if isinstance(found, Compound) and found.kind in ("()", "column", "row"):
        return Compound(found.kind, tuple(value(f"-({part.text})") for part in found.parts if isinstance(part, Scalar)))
    kind = brackets(text)
    if kind and len(top_level(text[1:-1], ",")) > 1:
        return _compound(kind, text[1:-1])
    expression = _expression(text)
    bare, noun = split_noun(text) if expression is None else (text, "")
    if bare != text and not QUALIFIERS & set(words(noun)):
        return Scalar(bare, _expression(bare), noun)
    return Scalar(text, expression)


def expansions(text: str) -> list[list[str]]:
    r"""The texts that one with `\pm` stands for, in each way of reading it; `[[text]]` without the sign.

    All its signs go together, or each is free; `\mp` goes against `\pm`.
    """
    signs = _SIGN.findall(text)
    if not signs or len(signs) > MAX_SIGNS:
        return [[text]]
    together = [_signed(text, ["+" if (sign == "\\pm") == upper else "-" for sign in signs]) for upper in (True, False)]
    if len(signs) == 1 or "\\mp" in signs:
        return [together]
    return [together, [_signed(text, choice) for choice in product("+-", repeat=len(signs))]]


def same_values(left: Value, right: Value, same_expressions: Same = same) -> bool:
    """Whether two values are equal."""
    if isinstance(left, Scalar) and isinstance(right, Scalar):
        if units_differ(left.noun, right.noun):
            return False
        if compact(left.text) == compact(right.text):
            return bool(left.text)
        mine, yours = left.expression, right.expression
        if mine is None or yours is None or bases(left.text) != bases(right.text):
            return False
        mine, yours = _in_one_unit(mine, yours)
        return same_expressions(mine, yours) or _rounds_to(right.text, mine)
    if isinstance(left, Scalar) or isinstance(right, Scalar) or len(left.parts) != len(right.parts):
        return False
    kinds = {left.kind, right.kind}
    # Two numbers in square brackets are an interval.
    is_tuple = kinds in ({"column", "()"}, {"row", "()"}) or (kinds == {"()", "[]"} and len(left.parts) > 2)
    if len(kinds) > 1 and not is_tuple:
        return False
    if left.kind == "\\{\\}":
        return matched(left.parts, right.parts, lambda one, other: same_values(one, other, same_expressions))
    return all(same_values(one, other, same_expressions) for one, other in zip(left.parts, right.parts, strict=True))


def matched(left: Sequence[Element], right: Sequence[Element], equal: Callable[[Element, Element], bool]) -> bool:
    """Whether each element has a partner of its own on the other side, in any order."""
    remaining = list(right)
    for element in left:
        partner = next((index for index, other in enumerate(remaining) if equal(element, other)), None)
        if partner is None:
            return False
        remaining.pop(partner)
    return not remaining


def scaled(text: str, scale: Fraction) -> Value:
    """The value that `text` writes down, times `scale`."""
    found = value(text)
    if scale == 1 or isinstance(found, Compound):
        return found
    expression = found.expression and Apply("*", (Number(scale), found.expression))
    return Scalar(f"{scale} \\cdot ({text})", expression)


def _signed(text: str, signs: Sequence[str]) -> str:
    remaining = iter(signs)
    replaced = _SIGN.sub(lambda match: next(remaining), text)
    return re.sub(r"(^|[(,=\[{])\s*\+", r"\1", replaced).strip()


def _compound(kind: str, inside: str) -> Compound:
    parts = top_level(inside, ",")
    texts = [text for part in parts for text in expansions(part)[0]] if kind == "\\{\\}" else parts
    return Compound(kind, tuple(map(value, texts)))


def _expression(text: str) -> Expression | None:
    if (match := _MINUTES.fullmatch(text)) is not None:
        degrees, minutes, seconds = (Fraction(match[unit] or 0) for unit in ("degrees", "minutes", "seconds"))
        size = degrees + minutes / 60 + seconds / 3600
        return Apply("*", (Number(-size if match["sign"] else size), Variable(DEGREE)))
    exact = number(text)
    if exact is not None and "%" not in text:
        return Number(exact)
    return read_or_none(text)


def _in_one_unit(left: Expression, right: Expression) -> tuple[Expression, Expression]:
    r"""Both without the sign of degrees: it is `\pi`/180 beside a value with `\pi`, else one."""
    are_angles = DEGREE in variables(left), DEGREE in variables(right)
    if are_angles[0] == are_angles[1]:
        return left, right
    is_beside_pi = "\\pi" in str(right if are_angles[0] else left)
    radians = Apply("/", (Variable("\\pi"), Number(Fraction(180))))
    degree: dict[str, Expression] = {DEGREE: radians if is_beside_pi else Number(Fraction(1))}
    return substituted(left, degree), substituted(right, degree)


def _rounds_to(reference: str, answer: Expression) -> bool:
    """Whether `reference` is a decimal that an exact answer, itself no decimal, rounds to."""
    rounded = rounded_decimal(reference.strip())
    found = constant_value(answer) if rounded is not None else None
    if rounded is None or found is None:
        return False
    half = Fraction(1, 2 * 10 ** rounded[1])
    low, high = rounded[0] - half, rounded[0] + half
    if isinstance(found, Fraction):
        return not is_decimal(found) and low <= found <= high
    return hasattr(found, "_mpf_") and isinstance(found, SupportsFloat) and float(low) <= float(found) <= float(high)


def is_constant(found: Value) -> bool:
    """Whether a value is a number, possibly of degrees."""
    return isinstance(found, Scalar) and found.expression is not None and variables(found.expression) <= {DEGREE}


def size_of(found: Value) -> float | None:
    """The size of a real number; None for any other value."""
    number = constant_value(found.expression) if isinstance(found, Scalar) and found.expression is not None else None
    return float(number) if isinstance(number, SupportsFloat) and not isinstance(number, mpc) else None


def are_apart(left: Value, right: Value) -> bool:
    """Whether two values are constants that differ, and no rounding makes them equal."""
    if isinstance(left, Compound) or isinstance(right, Compound) or left.expression is None or right.expression is None:
        return False
    expressions = _in_one_unit(left.expression, right.expression)
    # Beside each other, degrees need no size; in a sine they have one.
    one, other = (
        constant_value(substituted(each, {DEGREE: Number(Fraction(1))}) if DEGREE in variables(each) else each)
        for each in expressions
    )
    if one is None or other is None or close(one, other):
        return False
    if "." not in left.text + right.text:
        return distinct(one, other)
    try:
        return abs(complex(one) - complex(other)) > 0.01 * max(abs(complex(one)), abs(complex(other)))
    except OverflowError:
        return False

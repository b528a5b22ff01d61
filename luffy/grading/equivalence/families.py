r"""Families with an integer parameter: `\frac{\pi}{6} + k\pi`, `3k + 1`, `n \equiv 1 \pmod 3`.

Answers are equal if their families contain the same numbers, whatever the letter, the shift by a period and the number
of families: `\frac{\pi}{4} + \frac{k\pi}{2}` is `\frac{\pi}{4} + k\pi, \frac{3\pi}{4} + k\pi`.
"""

import itertools
import math
import re
from fractions import Fraction
from itertools import pairwise
from typing import NamedTuple

from mpmath import mp

from luffy.grading.equivalence.expression import DEGREE, Expression, Number, read_or_none, substituted, variables
from luffy.grading.equivalence.numeric import NoValueError, close, constant_value, inexact, value_of
from luffy.grading.equivalence.numeric import Value as Scalar
from luffy.grading.equivalence.statement import Statement, split_items, statement
from luffy.grading.equivalence.text import strict_text
from luffy.grading.equivalence.values import expansions

MAX_RESIDUES = 240
"""Most residues, in the common period of all families of an answer, that are compared."""
_PARAMETERS = frozenset("knmltp")
_CONGRUENCE = re.compile(r"(?P<residues>.+?)\s*\(?\s*\\(?:pmod|bmod|mod)\s*\{?\s*(?P<modulus>[0-9]{1,6})\s*\}?\s*\)?$")
_PARITY = re.compile(
    r"(?:all|any|every)?\s*(?:[a-z]\s+(?:is|are|must be)\s+)?(?:an?\s+)?(?:all\s+)?(?:positive\s+)?(?P<parity>odd|even)"
    r"(?:\s+(?:positive\s+)?(?:integers?|numbers?|natural numbers?|values?))?(?:\s+(?:of\s+)?[a-z])?"
)


class Family(NamedTuple):
    """The numbers `offset + k period` for all integers `k`."""

    offset: Scalar
    period: Scalar


def same_families(left: Statement, right: Statement) -> bool | None:
    """Whether two statements list the same families; None where one of them lists anything else."""
    one, other = _families(left), _families(right)
    names = {item.label for stated in (left, right) for item in stated.items if item.label}
    if one is None or other is None or len(names) > 1:
        return None
    if not {*left.domains.values(), *right.domains.values()} <= {"Z"}:
        return None
    return _covers(one, other)


def same_residues(left: str, right: str) -> bool | None:
    """Whether two texts, one of them a congruence or a parity in words, hold the same integers; None for others."""
    if not any("mod" in text or _PARITY.fullmatch(strict_text(text).lower()) for text in (left, right)):
        return None
    one, other = (_residues(text) for text in (left, right))
    return None if one is None or other is None else _covers(one, other)


def _residues(text: str) -> list[Family] | None:
    """The families of a congruence, a parity in words, or a list of integers with one parameter."""
    plain = strict_text(text)
    parity = _PARITY.fullmatch(plain.lower())
    if parity is not None:
        return [Family(Fraction(parity["parity"] == "odd"), Fraction(2))]
    congruence = _CONGRUENCE.fullmatch(plain.replace("\\equiv", "="))
    if congruence is not None and (modulus := Fraction(congruence["modulus"])):
        parts = split_items(congruence["residues"].rpartition("=")[2])
        values = [constant_value(read) for part in parts if (read := read_or_none(part)) is not None]
        if parts and len(values) == len(parts) and None not in values:
            return [Family(found, modulus) for found in values]
    stated = statement(text)
    return None if stated is None else _families(stated, integers=True)


def _families(stated: Statement, integers: bool = False) -> list[Family] | None:
    families: list[Family] = []
    for text in (text for item in stated.items for text in expansions(item.body)[0]):
        expression = read_or_none(text)
        parameter = None if expression is None else _parameter(expression, stated, integers)
        if expression is None or parameter is None:
            return None
        point = {DEGREE: Fraction(1)}
        try:
            values = [value_of(substituted(expression, {parameter: Number(Fraction(k))}), point) for k in range(6)]
        except NoValueError:
            return None
        with mp.workdps(60):
            steps = [_minus(after, before) for before, after in pairwise(values)]
            double = [_minus(after, before) for before, after in zip(values, values[2:], strict=False)]
        if steps[0] != 0 and all(close(step, steps[0]) for step in steps):
            families.append(Family(values[0], steps[0]))
        elif double[0] != 0 and all(close(step, double[0]) for step in double):  # even and odd apart, as in `(-1)^k`
            families += [Family(values[0], double[0]), Family(values[1], double[0])]
        else:
            return None
    return families or None


def _parameter(expression: Expression, stated: Statement, integers: bool) -> str | None:
    """The letter of the integer parameter: one that the statement declares, or one beside `\\pi` or degrees."""
    names = variables(expression) - {DEGREE}
    if len(names) != 1:
        return None
    name = next(iter(names))
    if stated.domains.get(name) == "Z":
        return name
    is_angular = "pi" in str(expression) or DEGREE in variables(expression)
    return name if name in _PARAMETERS and name not in stated.domains and (is_angular or integers) else None


def _minus(left: Scalar, right: Scalar) -> Scalar:
    if isinstance(left, Fraction) and isinstance(right, Fraction):
        return left - right
    return inexact(left) - inexact(right)


def _covers(left: list[Family], right: list[Family]) -> bool:
    """Whether two lists hold the same numbers: as residues of their common period."""
    with mp.workdps(60):
        unit = inexact(left[0].period)
        periods = []
        for ratio in (inexact(family.period) / unit for family in (*left, *right)):
            if abs(ratio.imag) > 0 or not abs(ratio) < 10**6:
                return False
            period = Fraction(str(mp.nstr(ratio.real, 40))).limit_denominator(1000)
            if period == 0 or abs(inexact(period) - ratio) >= mp.mpf(10) ** -30:
                return False
            periods.append(abs(period))
        whole = Fraction(
            math.lcm(*(each.numerator for each in periods)), math.gcd(*(each.denominator for each in periods))
        )
        if sum(whole / period for period in periods) > MAX_RESIDUES:
            return False
        spread = [
            [inexact(family.offset) / unit + inexact(index * period) for index in range(int(whole / period))]
            for family, period in zip((*left, *right), periods, strict=True)
        ]
        one, other = (list(itertools.chain(*of_side)) for of_side in (spread[: len(left)], spread[len(left) :]))
        return all(any(_congruent(a, b, whole) for b in other) for a in one) and all(
            any(_congruent(a, b, whole) for a in one) for b in other
        )


def _congruent(left: Scalar, right: Scalar, whole: Fraction) -> bool:
    turns = (left - right) / inexact(whole)
    return bool(abs(turns - mp.nint(turns.real)) < mp.mpf(10) ** -40)

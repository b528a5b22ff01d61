"""Mathematical equality by this package's rules, then by math-verify. Runs only in a worker process.

math-verify's own time-outs rest on SIGALRM: they fail off the main thread, reset other people's alarms and do not
stop a computation inside a C extension. They are switched off here; the parent's deadline is the only one.

The rules (`alike`) come first: they are cheap and only say yes. math-verify decides the rest. Where it is known to be
wrong (`tests/unit/grading/test_verdicts.py` lists the cases), it is given a text that it can read, or its yes is
checked again: it compares to six decimals, drops units and takes a set for a tuple.
"""

import re
from collections.abc import Sequence
from fractions import Fraction

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify
from sympy import Basic, Expr, MatrixBase, N, Rational

from luffy.grading.alike import alike, conflicting
from luffy.grading.math_strict import bases, brackets, elements
from luffy.grading.presentation import unadorned
from luffy.grading.readable import readable
from luffy.grading.shortcuts import normalise
from luffy.grading.strict_text import compact, number, strict_text, without_unit
from luffy.grading.units import UNITS
from luffy.types import Outcome

_EXTRACTION = (LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig())
_TINY = 1e-3
_RELATIVE = 1e-6
_FAR = Fraction(1, 10)
"""No rounding makes two numbers equal that differ by more."""
_ROUNDED = re.compile(r"-?[0-9]*\.([0-9]{2,6})")
_PROSE = re.compile(r"\\text(?:bf|rm)?\s*\{[^{}]*[A-Za-z]{3,}[^{}]*\s[^{}]*[A-Za-z]{3,}[^{}]*\}")
_NUMBER = re.compile(r"[0-9]+(?:\.[0-9]+)?")
Parsed = Sequence[Basic | MatrixBase | str]


def verify_answer(answer: str, ground_truth: str) -> Outcome:
    """Return `CORRECT`, `WRONG`, or `UNPARSABLE` where either side cannot be read as mathematics.

    May take forever, exhaust its memory or crash the interpreter: `9^{9^{9^9}}` is a legal answer.
    """
    answer = unadorned(answer, ground_truth)
    known = _by_text(answer, ground_truth)
    if known is not None:
        return known
    if alike(answer, ground_truth):
        return Outcome.CORRECT
    gold, target = _parse(ground_truth), _parse(answer)
    if verify(gold, target, timeout_seconds=None, allow_set_relation_comp=True):
        return Outcome.WRONG if _disagree(answer, ground_truth, gold, target) else Outcome.CORRECT
    if _rounds_to(ground_truth, target):
        return Outcome.CORRECT
    return Outcome.WRONG if _is_read(gold) and _is_read(target) else Outcome.UNPARSABLE


def _by_text(answer: str, ground_truth: str) -> Outcome | None:
    """The verdict on equal texts and on two numbers that are equal, or far from it; None where math-verify decides.

    It saves parsing LaTeX, which takes most of the time of a grade.
    """
    left, right = strict_text(answer), strict_text(ground_truth)
    if left and compact(left) == compact(right):
        return Outcome.CORRECT
    if "%" in left + right:
        return None
    parts, wanted = [left], [right]
    if brackets(left) == brackets(right) and brackets(left) not in ("", "\\{\\}"):
        parts, wanted = elements(left), elements(right)
    if len(parts) != len(wanted):
        return None
    return _by_numbers([number(part) for part in parts], [number(part) for part in wanted])


def _by_numbers(found: Sequence[Fraction | None], wanted: Sequence[Fraction | None]) -> Outcome | None:
    pairs = [(one, other) for one, other in zip(found, wanted, strict=True) if one is not None and other is not None]
    if len(pairs) < len(found):
        return None
    if all(one == other for one, other in pairs):
        return Outcome.CORRECT
    far = any(abs(one - other) > _FAR * max(abs(one), abs(other)) for one, other in pairs)
    return Outcome.WRONG if far else None


def _parse(text: str) -> Parsed:
    # A reference may be a whole solution, with boxes of its own.
    boxed = text if "\\boxed" in text else f"\\boxed{{{normalise(readable(text))}}}"
    return parse(boxed, extraction_config=_EXTRACTION, parsing_timeout=None)


def _is_read(parsed: Parsed) -> bool:
    return any(isinstance(value, Basic | MatrixBase) for value in parsed)


def _disagree(answer: str, ground_truth: str, gold: Parsed, target: Parsed) -> bool:
    """Whether two sides that math-verify considers equal differ in something that it ignores."""
    if conflicting(answer, ground_truth):
        return True
    left, right = strict_text(answer), strict_text(ground_truth)
    if {_bracket(left), _bracket(right)} == {"\\{\\}", "()"}:
        return True
    if bases(left) and bases(right) and bases(left) != bases(right):
        return True
    units = _unit(left), _unit(right)
    if None not in units and units[0] != units[1]:
        return True
    if _PROSE.search(answer) and _PROSE.search(ground_truth):
        return _NUMBER.findall(answer) != _NUMBER.findall(ground_truth)
    return _differ_relatively(_constant(gold), _constant(target))


def _unit(text: str) -> int | None:
    """Number of the unit after a number, whatever its power; None for an unknown one."""
    return UNITS.get(without_unit(text)[1].partition("^")[0].strip())


def _bracket(text: str) -> str:
    if text.startswith("\\{") and text.endswith("\\}"):
        return "\\{\\}"
    return "()" if text.startswith("(") and text.endswith(")") and "," in text else ""


def _differ_relatively(left: Expr | None, right: Expr | None) -> bool:
    """Whether two small constants differ in more than their last digits: six decimals see no difference there."""
    if left is None or right is None:
        return False
    one, other = N(left, 30), N(right, 30)
    size = max(abs(one), abs(other))
    return bool(size < _TINY and abs(one - other) > _RELATIVE * size)


def _constant(parsed: Parsed) -> Expr | None:
    value = parsed[0] if parsed else None
    is_constant = isinstance(value, Expr) and value.is_number and value.is_real and value.is_finite
    return value if is_constant and isinstance(value, Expr) else None


def _rounds_to(ground_truth: str, target: Parsed) -> bool:
    """Whether the reference is a decimal of three or more digits that an exact answer rounds to.

    An answer that is a decimal itself is compared with the reference as it stands.
    """
    reference = _ROUNDED.fullmatch(strict_text(ground_truth))
    value = _constant(target)
    if reference is None or value is None or value.is_Float or len(reference[0].strip("-0.").replace(".", "")) < 3:
        return False
    if isinstance(value, Rational) and _is_decimal(value.q):
        return False
    digits = Fraction(reference[0])
    return bool(abs(N(value, 30) - Rational(digits.numerator, digits.denominator)) * 10 ** len(reference[1]) <= 0.5)


def _is_decimal(denominator: int) -> bool:
    while denominator % 2 == 0:
        denominator //= 2
    while denominator % 5 == 0:
        denominator //= 5
    return denominator == 1

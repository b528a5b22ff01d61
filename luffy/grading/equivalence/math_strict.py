"""`math_strict`: equality by text, by exact number, then by sympy. Runs in a worker, which may be killed.

A reimplementation in the style of Dr.GRPO's grader (arXiv 2503.20783): no tolerance, a letter directly after a number
is a variable and no unit, capitals differ from small letters, brackets and order matter, sets are unordered. It does
not use math-verify, only the LaTeX parser below it (latex2sympy2_extended).
"""

import re

from latex2sympy2_extended.latex2sympy2 import ConversionConfig, latex2sympy
from sympy import Basic, E, Eq, Expr, I, MatrixBase, N, Symbol, nan, simplify, zoo
from sympy.core.relational import Relational

from luffy.grading.equivalence.statement import bases, brackets, elements
from luffy.grading.equivalence.text import SCALES, compact, number, strict_text, without_unit, without_variable, words
from luffy.grading.equivalence.values import matched
from luffy.grading.extract import last_box
from luffy.types import Outcome

Verdict = tuple[Outcome, str]
_CONSTANTS = {Symbol("e"): E, Symbol("i"): I}
"""One-letter names that answers use only for the constants."""
_WORDS = re.compile("[A-Za-z]{3,}(?: [A-Za-z]+)*")
_CASE_SENSITIVE = ConversionConfig(lowercase_symbols=False)
_DEGREES = re.compile(r"([0-9.]+)\s*\^\s*\\circ(?![a-z])")
_FACTOR = re.compile(r"(?<![\w.])([0-9.]+)\s*\(")
_ANGULAR = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![a-z])")
_PRIME = re.compile(r"'|\\prime")
_RELATIVE = 1e-15
"""Relative difference, computed to 30 digits, up to which two constants count as equal."""


def strictly_equal(answer: str, gold: str) -> Verdict:
    """Return the outcome and the step that decided it. May never return."""
    left, right = strict_text(answer), strict_text(last_box(gold) or gold)
    if not left or not right:
        return Outcome.UNPARSABLE, "only layout"
    if compact(left) == compact(right) or (_WORDS.fullmatch(left) and left.lower() == right.lower()):
        return Outcome.CORRECT, "equal texts"
    if ("=" in left) != ("=" in right):
        left, right = without_variable(left), without_variable(right)
    if bases(left) != bases(right):
        return Outcome.WRONG, "different number bases"
    return _equal(*_same_units(left, right))


def _same_units(left: str, right: str) -> tuple[str, str]:
    """Both texts without a unit that only one has or both share; unchanged if the units differ or both are lists."""
    (answer, unit), (reference, wanted) = without_unit(left), without_unit(right)
    if len(elements(left)) > 1 and len(elements(right)) > 1 and number(answer) is None:
        return left, right  # the last element's unit is not that of the others
    if unit != wanted and SCALES.keys() & {*words(unit), *words(wanted)}:
        return left, right
    if bool(unit) != bool(wanted) or unit == wanted:
        return answer, reference
    return left, right


def _equal(left: str, right: str) -> Verdict:
    one, other = number(left), number(right)
    if one is not None and other is not None:
        return (Outcome.CORRECT, "equal numbers") if one == other else (Outcome.WRONG, "different numbers")
    parts, wanted = elements(left), elements(right)
    if len(parts) == len(wanted) == 1:  # brackets around a single element only group
        expression, reference = _read(left), _read(right)
        if expression is None or reference is None:
            return Outcome.UNPARSABLE, "not a formula" if expression is None else "the reference is not a formula"
        is_same = _same(expression, reference)
        return (Outcome.CORRECT, "equal expressions") if is_same else (Outcome.WRONG, "different expressions")
    if brackets(left) != brackets(right) or len(parts) != len(wanted):
        return Outcome.WRONG, "different brackets or numbers of elements"
    if brackets(left) in ("\\{\\}", ""):
        if matched(parts, wanted, lambda part, other: _equal_element(part, other)[0] is Outcome.CORRECT):
            return Outcome.CORRECT, "equal elements in any order"
        return Outcome.WRONG, "an element without a match"
    for part, asked in zip(parts, wanted, strict=True):
        outcome, reason = _equal_element(part, asked)
        if outcome is not Outcome.CORRECT:
            return outcome, f"an element: {reason}"
    return Outcome.CORRECT, "equal elements"


def _equal_element(part: str, reference: str) -> Verdict:
    if compact(part) == compact(reference):
        return Outcome.CORRECT, "equal texts"
    return _equal(*_same_units(strict_text(part), strict_text(reference)))


def _read(text: str) -> Basic | None:
    """Return `text` as a sympy expression; None if it does not parse, or would with a part left out or misread.

    Prose would parse as a product, and primes are dropped.
    """
    if any(word.isalpha() and len(word) > 3 for word in text.replace("\\", " \\").split()) or _PRIME.search(text):
        return None
    text = _FACTOR.sub(r"\1\\cdot(", text)  # the parser reads a bracketed fraction after a number as a mixed number
    if _ANGULAR.search(text):  # and drops degrees
        text = _DEGREES.sub(r"(\1\\cdot\\frac{\\pi}{180})", text)
    try:
        read = latex2sympy(text, conversion_config=_CASE_SENSITIVE)
    except Exception:  # noqa: BLE001 - the parser raises whatever its grammar and sympy raise
        return None
    if isinstance(read, MatrixBase):
        read = read.as_immutable()
    if not isinstance(read, Basic) or read.has(nan, zoo):
        return None
    # A sum's index is no constant.
    return read.xreplace({name: value for name, value in _CONSTANTS.items() if name in read.free_symbols})


def _same(left: Basic, right: Basic) -> bool:
    if left == right:
        return True
    if isinstance(left, MatrixBase) or isinstance(right, MatrixBase):
        if not (isinstance(left, MatrixBase) and isinstance(right, MatrixBase)) or left.shape != right.shape:
            return False
        return all(_same(one, other) for one, other in zip(left, right, strict=True))
    if isinstance(left, Relational) or isinstance(right, Relational):
        if not (isinstance(left, Eq) and isinstance(right, Eq)):
            return isinstance(left, Relational) and isinstance(right, Relational) and left.canonical == right.canonical
        if not all(isinstance(side, Expr) for side in (*left.args, *right.args)):
            return False  # an equation with a set, which has no difference
        ratio = simplify((left.lhs - left.rhs) / (right.lhs - right.rhs))
        return bool(ratio.is_number and ratio != 0)
    if left.free_symbols != right.free_symbols:
        return False
    try:
        if left.free_symbols or (left.is_rational and right.is_rational):
            return bool(simplify(left - right) == 0)  # exact: 30 digits cannot distinguish two huge integers
        # By digits: `simplify` of two constants may be slow, and 30 digits distinguish different ones at once.
        one, other = N(left, 30), N(right, 30)
        size = max(abs(one), abs(other))
        return bool(size.is_finite and abs(one - other) <= _RELATIVE * size)
    except (TypeError, ValueError, AttributeError, NotImplementedError):
        return False  # sympy cannot subtract, say, a set

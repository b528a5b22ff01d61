r"""Answers that are refused unread: parsing or comparing them would run past any time limit.

The check is cheap and linear. A refused answer is `unparsable`, with the reason. Answers that equal the reference as
text never get here. The bounds are far above any reference, so no computable answer is lost.
"""

import math
import re

from luffy.grading.shortcuts import MAX_ANSWER_CHARS, MAX_NESTING, nesting

MAX_DIGITS = 1000
"""Digits of the longest number."""
MAX_POWER_DIGITS = 1_000_000
"""Digits of the largest power of numbers, written out."""
MAX_FACTORIAL = 100_000
MAX_TERMS = 10_000
"""Upper limit of a sum or product over integers."""
MAX_ELEMENTS = 100
"""Elements of the largest list, set or union; comparing unions and sets of symbols takes exponential time."""
MAX_DETERMINANT = 25
"""Entries of the largest determinant."""

_DIGITS = re.compile(rf"[0-9]{{{MAX_DIGITS + 1}}}")
_CHAIN = re.compile(r"[0-9]++(?:\s*\^\s*[{(]?\s*[0-9]++)++")
_FACTORIAL = re.compile(r"([0-9]++(?:\s*\^\s*[{(]?\s*[0-9]++)*+)[\s})]*!")
_NESTED_FACTORIAL = re.compile(r"!\s*(?:!\s*!|[})]+\s*!)")
_BINOMIAL = re.compile(r"\\[dt]?binom\s*\{([^{}]{0,40}(?:\{[^{}]{0,20}\}[^{}]{0,20})?)\}\s*\{([^}]{0,40})")
_LIMITS = re.compile(r"\\(?:sum|prod)(?![a-z])[^^]{0,80}\^\s*\{?\s*([0-9]++(?:\s*\^\s*\{?\s*[0-9]++)*+)")
_NUMBER = re.compile(r"[0-9]++")


def refusal(text: str) -> str | None:
    """Return in a short phrase why `text` is refused; None if it may be computed."""
    if len(text) > MAX_ANSWER_CHARS:
        return f"longer than {MAX_ANSWER_CHARS} characters"
    if nesting(text) > MAX_NESTING:
        return f"nested deeper than {MAX_NESTING}"
    plain = text.replace("\\cdot", "*").replace("\\left", "").replace("\\right", "").replace("**", "^")
    if _DIGITS.search(plain):
        return f"a number with more than {MAX_DIGITS} digits"
    if any(_magnitude(chain) > MAX_POWER_DIGITS for chain in _CHAIN.findall(plain)):
        return "a power too large to write out"
    return _large_function(plain) or _many_elements(plain)


def _large_function(text: str) -> str | None:
    if _NESTED_FACTORIAL.search(text) or any(_exceeds(number, MAX_FACTORIAL) for number in _FACTORIAL.findall(text)):
        return "a factorial too large to write out"
    for above, below in _BINOMIAL.findall(text):
        if _exceeds(above, MAX_FACTORIAL) and _exceeds(below, MAX_FACTORIAL):
            return "a binomial coefficient too large to write out"
    if any(_exceeds(limit, MAX_TERMS) for limit in _LIMITS.findall(text)):
        return f"a sum or product with more than {MAX_TERMS} terms"
    return None


def _many_elements(text: str) -> str | None:
    if text.count(",") > MAX_ELEMENTS or text.count("\\cup") > MAX_ELEMENTS // 5:
        return "a list with too many elements"
    if text.count("&") > MAX_DETERMINANT and ("vmatrix" in text or "\\det" in text):
        return "a determinant too large to expand"
    return None


def _exceeds(text: str, bound: int) -> bool:
    """Whether the largest power or number in `text` is above `bound`."""
    chains = _CHAIN.findall(text) or _NUMBER.findall(text)
    return any(_magnitude(chain) > math.log10(bound) for chain in chains)


def _magnitude(chain: str) -> float:
    """Decimal logarithm of `a^b^c...`; infinite if it is too large to compute."""
    numbers = [int(number) for number in _NUMBER.findall(chain)]
    exponent = 1
    for base in reversed(numbers[1:]):
        size = exponent * math.log10(base) if base > 1 else 0.0
        if size > 300:
            return math.inf if numbers[0] > 1 else 0.0
        exponent = base**exponent
    return exponent * math.log10(numbers[0]) if numbers[0] > 1 else 0.0

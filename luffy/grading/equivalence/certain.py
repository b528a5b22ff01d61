r"""Verdicts that need no computer algebra, for the process that grades: this module must not import sympy.

`settle` decides equal texts and plain numbers, exactly. `refusal` says why an answer is not computed at all: parsing or
comparing it would run past any time limit. `by_label` compares the labels of options in front of answers. All are
linear in the length of a text.
"""

import math
import re
from typing import NamedTuple

from luffy.grading.equivalence.text import PERCENT_WORD, compact
from luffy.types import Outcome

MAX_ANSWER_CHARS = 4096
"""Longer answers are not verified: no reference is that long, and a request must fit in a pipe's buffer."""

_NUMBER = re.compile(r"([+-]?)([0-9]*)(?:\.([0-9]*))?")
MAX_NESTING = 50
"""Deeper expressions are not verified: parsing them takes seconds, and no reference is that deep."""

WRAPPERS = ("\\text{", "\\textbf{", "\\mathrm{", "\\mathbf{")
_SPACING = {"\\,": " ", "\\;": " ", "\\:": " ", "\\!": "", "\\dfrac": "\\frac", "\\tfrac": "\\frac", "~": " "}
_BRACKET = re.compile(r"[()\[\]{}]")


def settle(answer: str, ground_truth: str) -> Outcome | None:
    """Return the verdict on a pair if it is certain without algebra; None if a worker must decide.

    Plain integers and decimals are compared exactly, digit by digit: `07` equals `7.0`, and `0.3333333` differs from
    `0.333333` (math-verify would round both to six decimals).
    """
    if answer == ground_truth:
        return Outcome.CORRECT
    if any(len(text) > MAX_ANSWER_CHARS or nesting(text) > MAX_NESTING for text in (answer, ground_truth)):
        return Outcome.UNPARSABLE
    left, right = normalise(answer), normalise(ground_truth)
    if left and left == right:
        return Outcome.CORRECT
    number, reference = canonical_number(left), canonical_number(right)
    if number is None or reference is None:
        return None
    return Outcome.CORRECT if number == reference else Outcome.WRONG


def normalise(text: str) -> str:
    r"""Return `text` without insignificant markup: outer `$`, `\text{}`, idle spaces, a final full stop."""
    for command, replacement in _SPACING.items():
        text = text.replace(command, replacement)
    text = " ".join(text.split())
    text = text.removesuffix(".").strip()
    text = PERCENT_WORD.sub(r"\\%", text)
    if len(text) > 2 and text[0] == text[-1] == "$" and "$" not in text[1:-1]:
        text = text[1:-1].strip()
    for wrapper in WRAPPERS:
        inner = text[len(wrapper) : -1]
        if text.startswith(wrapper) and text.endswith("}") and not set("{}\\") & set(inner):
            text = inner.strip()
    return compact(text)


def nesting(text: str) -> int:
    """Return the maximum nesting depth of brackets, counting every kind."""
    depth = deepest = 0
    for character in _BRACKET.findall(text):
        depth += 1 if character in "([{" else -1
        deepest = max(deepest, depth)
    return deepest


def canonical_number(text: str) -> tuple[str, str, str] | None:
    """Return (sign, integer digits, decimal digits) of a plain number, without padding zeros, else None."""
    match = _NUMBER.fullmatch(text)
    if match is None:
        return None
    sign, whole, decimals = match.group(1), match.group(2), match.group(3) or ""
    if not whole and not decimals:
        return None
    whole, decimals = whole.lstrip("0"), decimals.rstrip("0")
    negative = sign == "-" and bool(whole or decimals)
    return "-" if negative else "", whole, decimals


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
_INTEGER = re.compile(r"[0-9]++")


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
    if _NESTED_FACTORIAL.search(plain) or any(_exceeds(number, MAX_FACTORIAL) for number in _FACTORIAL.findall(plain)):
        return "a factorial too large to write out"
    for above, below in _BINOMIAL.findall(plain):
        if _exceeds(above, MAX_FACTORIAL) and _exceeds(below, MAX_FACTORIAL):
            return "a binomial coefficient too large to write out"
    if any(_exceeds(limit, MAX_TERMS) for limit in _LIMITS.findall(plain)):
        return f"a sum or product with more than {MAX_TERMS} terms"
    if plain.count(",") > MAX_ELEMENTS or plain.count("\\cup") > MAX_ELEMENTS // 5:
        return "a list with too many elements"
    if plain.count("&") > MAX_DETERMINANT and ("vmatrix" in plain or "\\det" in plain):
        return "a determinant too large to expand"
    return None


def _exceeds(text: str, bound: int) -> bool:
    """Whether the largest power or number in `text` is above `bound`."""
    chains = _CHAIN.findall(text) or _INTEGER.findall(text)
    return any(_magnitude(chain) > math.log10(bound) for chain in chains)


def _magnitude(chain: str) -> float:
    """Decimal logarithm of `a^b^c...`; infinite if it is too large to compute."""
    numbers = [int(number) for number in _INTEGER.findall(chain)]
    exponent = 1
    for base in reversed(numbers[1:]):
        size = exponent * math.log10(base) if base > 1 else 0.0
        if size > 300:
            return math.inf if numbers[0] > 1 else 0.0
        exponent = base**exponent
    return exponent * math.log10(numbers[0]) if numbers[0] > 1 else 0.0


# Labels of options in front of answers: `(C)`, `\textbf{(C)}\ 12`, `C. 12`, `\text{Option C}`.
_MARKUP = re.compile(r"\\(?:text(?:bf|it|rm)?|math(?:rm|bf)|mbox)(?![A-Za-z])\s*\{|\\(?:[ ,;:]|q?quad(?![A-Za-z]))|~")
_OPTION = re.compile(
    r"(?:(?P<named>[Oo]ption|[Cc]hoice|[Aa]nswer)\s+)?(?:\((?P<inside>[A-J])\)|(?P<plain>[A-J])(?P<mark>[).:]|$))(?:\s+|$)"
)
_BRACE = re.compile(r"(?<!\\)[{}]")
_VALUE = re.compile(r"[0-9.(\[{$A-Za-z]|-[0-9A-Za-z\\]|\\(?:[dtc]?frac|sqrt|pi|infty|pm|left)(?![A-Za-z])|\\[{$]")
"""What a value may begin with: an operator makes `(C)` a factor or a term."""
_SECOND = re.compile(r"(?<![A-Za-z\\])(?:[A-J]|or|and|not|is|isn't|wrong|incorrect|false)(?![A-Za-z])")
"""A value with one of these names a second option, or denies the first."""


class Labelled(NamedTuple):
    """An option's label and the text after it, which is empty for a label alone."""

    label: str
    value: str
    is_marked: bool
    """Whether anything tells the label from a variable."""


def labelled(text: str) -> Labelled | None:
    """Return the label of an answer and its value, without markup of letters; None without exactly one label."""
    plain = _MARKUP.sub(lambda match: "{" if match[0].endswith("{") else " ", text).strip()
    bare = _unbraced(plain)
    found = _OPTION.match(bare)
    if found is None:
        return None
    value = bare[found.end() :]
    if value and (_VALUE.match(value) is None or _SECOND.search(value)):
        return None
    is_marked = bare != plain or any(found[mark] for mark in ("named", "inside", "mark"))
    return Labelled(found["inside"] or found["plain"], value, is_marked)


def _unbraced(text: str) -> str:
    """`text` without braces around its beginning, such as those of `{(C)} 12` and `{(C) 12}`."""
    while text.startswith("{"):
        depth = 0
        for brace in _BRACE.finditer(text):
            depth += 1 if brace[0] == "{" else -1
            if not depth:
                text = f"{text[1 : brace.start()]} {text[brace.end() :]}".strip()
                break
        else:
            return text
    return text


def by_label(answer: str, reference: str) -> tuple[str, str]:
    """What is compared of an answer and a reference that may have labels: their labels, their values, or all."""
    yours, mine = labelled(reference), labelled(answer)
    if yours is None:  # the reference may be the value of the option
        return (mine.value if mine and mine.is_marked and mine.label in "ABCDE" else "") or answer, reference
    if mine is None:
        return answer, yours.value or reference
    if mine.label == yours.label and mine.value and yours.value:
        return mine.value, yours.value
    return (mine.label, yours.label) if mine.is_marked or yours.is_marked else (answer, reference)

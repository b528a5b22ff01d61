"""Verdicts that need no computer algebra: equal texts, and plain numbers.

Both are exact. A pair that they cannot decide goes to a worker.
"""

import re

from luffy.types import Outcome

MAX_ANSWER_CHARS = 4096
"""Longer answers are not verified: no reference is that long, and a request must fit in a pipe's buffer."""

_PERCENT_WORDS = ("percentage", "percent", "pct")
_NUMBER = re.compile(r"([+-]?)([0-9]*)(?:\.([0-9]*))?")
MAX_NESTING = 50
"""Deeper expressions are not verified: parsing them takes seconds, and no reference is that deep."""

_WRAPPERS = ("\\text{", "\\textbf{", "\\mathrm{", "\\mathbf{")
_SPACING = {"\\,": " ", "\\;": " ", "\\:": " ", "\\!": "", "\\dfrac": "\\frac", "\\tfrac": "\\frac", "~": " "}
_BRACKET = re.compile(r"[()\[\]{}]")
# A space between two digits (mixed numbers) or two letters (`\sin x`) is significant; any other is not.
_IDLE_SPACE = re.compile(r"(?<![0-9A-Za-z]) | (?![0-9A-Za-z])|(?<=[0-9]) (?=[A-Za-z])|(?<=[A-Za-z]) (?=[0-9])")


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
    for word in _PERCENT_WORDS:
        if text.endswith(word):
            text = text.removesuffix(word).rstrip() + "\\%"
    if len(text) > 2 and text[0] == text[-1] == "$" and "$" not in text[1:-1]:
        text = text[1:-1].strip()
    for wrapper in _WRAPPERS:
        inner = text[len(wrapper) : -1]
        if text.startswith(wrapper) and text.endswith("}") and not set("{}\\") & set(inner):
            text = inner.strip()
    return _IDLE_SPACE.sub("", text)


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

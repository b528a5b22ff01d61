r"""The first two steps of `math_strict`: answers that are the same text, and answers that are the same number.

Only layout is dropped (spacing, `\left`, `\text`, dollars, a variable in front of an equals sign), and a unit that only
one side gives. Numbers are exact fractions: `0.5`, `1/2`, `\frac12`, `50\%`, `5\times10^{-1}` are equal.
"""

import re
from fractions import Fraction

from luffy.grading.readable import readable
from luffy.grading.units import is_noun

_REPLACED = (
    ("\\dfrac", "\\frac"),
    ("\\tfrac", "\\frac"),
    ("\\cfrac", "\\frac"),
    ("\\left", ""),
    ("\\right", ""),
    ("\\displaystyle", ""),
    ("\\$", ""),
    ("$", ""),
    ("\\!", ""),
    ("\\,", " "),
    ("\\;", " "),
    ("\\:", " "),
    ("\\quad", " "),
    ("~", " "),
    ("{,}", ","),
    ("^{\\circ}", "^\\circ"),
    ("\\lbrace", "\\{"),
    ("\\rbrace", "\\}"),
    ("\\neq", "\\ne"),
    ("\\leq", "\\le"),
    ("\\geq", "\\ge"),
)
_SPACE = re.compile(r"(?<!\\)((?:\\\\)*)\\ ")
"""A backslash and a space; the second backslash of a matrix's row break is none."""
_STRAY_EMPHASIS = re.compile(r"(?<![\w)\]}])\*\*|\*\*$")
_TEXT = re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf|textnormal|textrm|mbox|operatorname)\s*\{([^{}]*)\}")
_DOUBLED = re.compile(r"\\\\(?=(?:left|right|[dt]?frac|sqrt|pi|text|cdot|times|infty|le|ge)(?![a-z]))")
_PERCENT_WORD = re.compile(r"(?<=[0-9])\s*(?:percentage|percent|pct)$")
_SHORT_FRACTION = re.compile(r"\\frac\s*([0-9])\s*([0-9])(?![0-9])")
_SHORT_ROOT = re.compile(r"\\sqrt\s*([0-9a-zA-Z])")
_UNIT = re.compile(r"(?<=[0-9}])(?P<space>\s*)(?P<unit>[A-Za-z]{1,20}(?:\s+[a-z]+){0,2})(?:\^\{?[23]\}?)?$")
_VARIABLE = re.compile(r"^[A-Za-z](?:_\{?\w+\}?)?(?:\([a-z]\))?\s*=\s*(?=[^=]+$)")
_GROUPED = re.compile(r"[+-]?[0-9]{1,3}(?:[, ][0-9]{3})+(?:\.[0-9]+)?")
_DECIMAL = re.compile(r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)")
_SCIENTIFIC = re.compile(r"(.+?)(?:\\times|\\cdot|\*)\s*10\s*\^\s*\{?\s*([+-]?[0-9]{1,3})\s*\}?")
_EXPONENT = re.compile(r"([+-]?[0-9.]+)[eE]([+-]?[0-9]{1,3})")
_FRACTION = re.compile(r"([+-]?)\s*\\frac\s*\{([^{}]+)\}\s*\{([^{}]+)\}")
_MIXED = re.compile(r"([+-]?)\s*([0-9]+)\s*(?:\\frac\s*\{([0-9]+)\}\s*\{([0-9]+)\}|\s([0-9]+)/([0-9]+))")
MAX_EXPONENT = 400


def strict_text(text: str) -> str:
    """Return `text` without its layout."""
    text = readable(_DOUBLED.sub(r"\\", text))
    for found, replacement in _REPLACED:
        text = text.replace(found, replacement)
    text = _STRAY_EMPHASIS.sub(" ", _TEXT.sub(r" \1 ", _SPACE.sub(r"\1 ", text)))
    text = _SHORT_FRACTION.sub(r"\\frac{\1}{\2}", text)
    text = _SHORT_ROOT.sub(r"\\sqrt{\1}", text)
    return _PERCENT_WORD.sub(r"\\%", " ".join(text.split()).removesuffix(".").strip())


def without_variable(text: str) -> str:
    """Return the right-hand side of `x = ...`; `text` itself where it is not such an equation."""
    return _VARIABLE.sub("", text)


def compact(text: str) -> str:
    """Return `text` without spaces, except where two words or digits would run together."""
    return re.sub(r"(?<![0-9A-Za-z]) | (?![0-9A-Za-z])|(?<=[0-9]) (?=[A-Za-z])|(?<=[A-Za-z]) (?=[0-9])", "", text)


def without_unit(text: str) -> tuple[str, str]:
    """Return `text` and the word of a unit after its number; degrees are a unit."""
    if text.endswith("^\\circ"):
        angle = text.removesuffix("^\\circ")
        return (angle, "degrees") if number(angle) is not None else (text, "")
    match = _UNIT.search(text)
    if match is None or not is_noun(match["unit"], bool(match["space"])):
        return text, ""
    return text[: match.start()].strip(), text[match.start("unit") :]


def number(text: str) -> Fraction | None:
    """Return the exact value of a number as text; None for anything else."""
    text = text.strip()
    if text.endswith("\\%") or text.endswith("%"):
        part = number(text.removesuffix("%").removesuffix("\\"))
        return None if part is None else part / 100
    if _GROUPED.fullmatch(text):
        text = text.replace(",", "").replace(" ", "")
    if _DECIMAL.fullmatch(text):
        return Fraction(text)
    return _compound(text)


def _compound(text: str) -> Fraction | None:
    if match := _SCIENTIFIC.fullmatch(text) or _EXPONENT.fullmatch(text):
        base, exponent = number(match[1]), int(match[2])
        return None if base is None or abs(exponent) > MAX_EXPONENT else base * Fraction(10) ** exponent
    if match := _MIXED.fullmatch(text):
        above, below = int(match[3] or match[5]), int(match[4] or match[6])
        return None if below == 0 else _signed(match[1], Fraction(int(match[2])) + Fraction(above, below))
    if match := _FRACTION.fullmatch(text):
        return _quotient(match[1], match[2], match[3])
    head, slash, tail = text.partition("/")
    if slash and "/" not in tail:
        return _quotient("", head, tail)
    return None


def _quotient(sign: str, above: str, below: str) -> Fraction | None:
    top, bottom = number(above), number(below)
    return None if top is None or not bottom else _signed(sign, top / bottom)


def _signed(sign: str, value: Fraction) -> Fraction:
    return -value if sign == "-" else value

r"""Rewriting of answers into LaTeX that math-verify reads, without changing their value.

Covers full-width and Arabic digits, invisible characters, bold, emoji, `\sqrt(2)`, `√2π`, `pi/2`, `1.2e5`, `2**3`,
`1\,234`, superscripts and vulgar fractions.
"""

import re
import unicodedata

from luffy.grading.repair import repaired

_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺ⁿ", "0123456789-+n")
_RAISED = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺ⁿ]+")
_VULGAR = re.compile("[¼-¾⅐-⅞]")
_SYMBOLS = str.maketrans(
    {
        "π": r"\pi ",
        "∞": r"\infty ",
        "×": r"\times ",
        "·": r"\cdot ",
        "÷": r"\div ",
        "−": "-",
        "–": "-",
        "≤": r"\le ",
        "≥": r"\ge ",
        "≠": r"\ne ",
        "∪": r"\cup ",
        "°": r"^\circ ",
    }
)
_ROOT = re.compile(r"√\s*(?:\(([^()]*)\)|([0-9]+|[A-Za-z]))")
_ROOT_IN_BRACKETS = re.compile(r"(?:\\|(?<![A-Za-z\\]))sqrt\s*\(([^()]*)\)")
_PI = re.compile(r"(?<![A-Za-z\\])pi(?![A-Za-z])")
_SCIENTIFIC = re.compile(r"(?<![\w.])([0-9]+(?:\.[0-9]+)?)[eE]([+-]?[0-9]{1,3})(?![\w.])")
_THOUSANDS = re.compile(r"(?<=[0-9])(?:\\[,;:!]|\{,\}|,\\!) ?(?=[0-9]{3}(?![0-9]))")
_BOLD = re.compile(r"\\(?:boldsymbol|bm|pmb)\s*\{([^{}]*)\}")
_EMPHASIS = re.compile(r"(?<![\w)\]}])\*\*(?=\S)([^*]+)(?<=\S)\*\*|^\s*\*\*([^*]*)$")
"""Two asterisks after an operand are a power, not emphasis."""
_POWER = re.compile(
    r"(?<=[\w)\]}])\s?\*\*\s?(?:([+-]?(?:[0-9]++(?:\.[0-9]++)?+|[A-Za-z](?![A-Za-z])))|\(([^()]*)\))(?!\s?\*\*)"
)
"""A power of a power is left alone: LaTeX defines no order for it."""


def readable(text: str) -> str:
    """Return `text` in LaTeX that math-verify reads; linear in its length."""
    text = _EMPHASIS.sub(lambda match: match[1] or match[2] or "", repaired(text))
    text = _POWER.sub(lambda match: f"^{{{match[1] or match[2]}}}", text)
    text = _RAISED.sub(lambda match: f"^{{{match.group().translate(_SUPERSCRIPTS)}}}", text)
    text = _VULGAR.sub(lambda match: _fraction(match.group()), text)
    if not (text.isascii() and text.isprintable()):
        text = "".join(map(_plain, unicodedata.normalize("NFKC", text.replace("√", "\ue000")))).replace("\ue000", "√")
    text = _ROOT.sub(lambda match: rf"\sqrt{{{match[1] or match[2]}}}", text.translate(_SYMBOLS))
    text = _ROOT_IN_BRACKETS.sub(r"\\sqrt{\1}", text)
    text = _BOLD.sub(r"\1", text)
    text = _SCIENTIFIC.sub(r"\1 \\cdot 10^{\2}", _THOUSANDS.sub("", text))
    return _PI.sub(r"\\pi", text).strip()


def _fraction(character: str) -> str:
    above, below = unicodedata.normalize("NFKC", character).split("\u2044")
    return rf"\frac{{{above}}}{{{below}}}"


def _plain(character: str) -> str:
    """The character; a digit of any script becomes ASCII, an invisible character or pictogram is dropped."""
    if character.isdecimal():
        return str(unicodedata.decimal(character))
    kind = unicodedata.category(character)
    return character if kind not in ("Cf", "Cc", "Cs", "So") or character in "°\n\t\ue000" else ""

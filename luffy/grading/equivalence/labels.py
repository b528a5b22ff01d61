r"""Labels of options in front of answers: `(C)`, `\textbf{(C)}\ 12`, `C. 12`, `\text{Option C}`.

Runs in the process that grades: this module must not import sympy, and is linear in the length of a text.
"""

import re
from typing import NamedTuple

_MARKUP = re.compile(r"\\(?:text(?:bf|it|rm)?|math(?:rm|bf)|mbox)(?![A-Za-z])\s*\{|\\(?:[ ,;:]|q?quad(?![A-Za-z]))|~")
_LABEL = re.compile(
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
    bare = _opened(plain)
    found = _LABEL.match(bare)
    if found is None:
        return None
    value = bare[found.end() :]
    if value and (_VALUE.match(value) is None or _SECOND.search(value)):
        return None
    is_marked = bare != plain or any(found[mark] for mark in ("named", "inside", "mark"))
    return Labelled(found["inside"] or found["plain"], value, is_marked)


def _opened(text: str) -> str:
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


def by_label(answer: str, reference: str) -> bool | tuple[str, str]:
    """Whether an answer chooses the reference's option; where values decide, the two to be compared."""
    yours = labelled(reference)
    mine = None if yours is None else labelled(answer)
    if yours is None or (mine is None and not yours.value):
        return answer, reference
    if mine is None:
        return answer, yours.value
    if mine.label == yours.label and mine.value and yours.value:
        return mine.value, yours.value
    if not (mine.is_marked or yours.is_marked):
        return answer, reference
    return mine.label == yours.label

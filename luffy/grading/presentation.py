r"""Removal of what only presents an answer: colour, size, an underline, a tick, the label of an option before a value.

`\textbf{(C)}\ 12` is 12 (the form of the AMC's published solutions), and so are `\textcolor{red}{12}`,
`\color{red}12`, `{\large 12}`, `\underline{12}` and `12\ \checkmark`. Only what surrounds the whole answer is removed:
a coloured part of a formula stays.
"""

import re

_SPACE = r"(?:\s|~|\\[ ,;:!]|\\q?quad(?![A-Za-z]))*"
_AROUND = re.compile(r"(?:\\(?:textcolor|color)\s*\{[^{}]*\}\s*|(?P<line>\\underline\s*))?\{")
"""A command whose last argument, or a group, may be the whole answer."""
_SWITCH = re.compile(
    r"\\(?:color\s*\{[^{}]*\}|(?:tiny|small|normalsize|large|Large|LARGE|huge|Huge)(?![A-Za-z]))" + _SPACE
)
_TICK = re.compile(r"\\checkmark\s*$")
_LABEL = re.compile(r"(?P<command>\\(?:text(?:bf|rm)?|math(?:bf|rm))\s*\{)\s*\([A-E]\)\s*(?P<alone>\}?)" + _SPACE)
_VALUE = re.compile(r"[0-9.(\[{$-]|\\(?:[dtc]?frac|sqrt|pi|infty|pm|left)(?![A-Za-z])|\\[{$]|[A-Za-z](?![A-Za-z])")
"""What a value may begin with: `(C)` before an operator, or before "or", is no label."""
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_LETTER = re.compile(r"(?<!\\)\b[A-Za-z]")
_MAX_LAYERS = 4


def unadorned(answer: str, gold: str) -> str:
    """Return `answer` without its presentation; a label stays where the reference has one, too."""
    text = answer.strip()
    for _ in range(_MAX_LAYERS):
        shorter = _peeled(text)
        if not shorter or shorter == text:
            break
        text = shorter
    return text if _LABEL.search(gold) else _without_label(text)


def _peeled(text: str) -> str:
    """`text` without one layer."""
    if tick := _TICK.search(text):
        return re.sub(_SPACE + r"\Z", "", text[: tick.start()])
    around = _AROUND.match(text)
    if around is not None and _closes_at_the_end(text, around.end()):
        inside = text[around.end() : -1].strip()
        # Underlined letters are the digits of a number, and not their product.
        return text if around["line"] and _LETTER.search(inside) else inside
    switch = _SWITCH.match(text)
    return text[switch.end() :].strip() if switch is not None else text


def _closes_at_the_end(text: str, start: int) -> bool:
    """Whether the group whose content begins at `start` ends with the text."""
    depth = 1
    for brace in _BRACE.finditer(text, start):
        depth += {"{": 1, "}": -1}.get(brace.group(), 0)
        if depth == 0:
            return brace.end() == len(text)
    return False


def _without_label(text: str) -> str:
    r"""The value of `\textbf{(C)}\ 12` or `\textbf{(C) 12}`; a label alone, and several options, stay."""
    label = _LABEL.match(text)
    if label is None:
        return text
    value = text[label.end() :]
    if not value.strip("{} ") or _VALUE.match(value) is None or re.search(r"\([A-E]\)", value):
        return text
    return value if label["alone"] else label["command"] + value

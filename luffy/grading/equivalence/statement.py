r"""Parses an answer into a list of items, each with label, value and noun, and the conditions on its parameters.

`w = 16, d = 3`, `16 \text{ and } 3`, `7 \text{ goats and } 4 \text{ helicopters}`, `x = \frac{\pi}{6} + k\pi, k \in
\mathbb{Z}`. Only separators, names and words are parsed; values stay text. A text with a word that may change
its meaning ("more than 7") is not a statement.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction

from luffy.grading.equivalence.expression import read_or_none, variables
from luffy.grading.equivalence.numeric import constant_value, same
from luffy.grading.equivalence.text import (
    QUALIFIERS,
    SCALES,
    compact,
    number,
    split_noun,
    strict_text,
    without_groups,
    words,
)

MAX_ITEMS = 40


@dataclass(frozen=True, slots=True)
class Item:
    """One element of a list."""

    body: str
    label: str = ""
    """What it is called: the left-hand side of its equation, or words."""
    noun: str = ""
    scale: Fraction = Fraction(1)
    """Factor from a word such as "million"."""


@dataclass(frozen=True, slots=True)
class Statement:
    """The items of an answer."""

    items: tuple[Item, ...]
    domains: Mapping[str, str] = field(default_factory=dict)
    """Parameter to the letter of its range: Z, N, R, C, Q; `const` for a constant."""


_NAMES = r"(?P<names>[A-Za-z](?:\s*,\s*[A-Za-z]){0,3})"
_NUMBER_SET = r"\\mathbb\s*\{?\s*[ZNRQC]\s*\}?|[ZNRQC]\b"
_MEMBER = re.compile(
    rf"(?:(?:for|where|with)\s+(?:all|any|every|each)?\s*)?{_NAMES}\s*\\in\s*(?P<set>{_NUMBER_SET})(?P<sign>[\^_](?:\{{[^{{}}]{{1,6}}\}}|[+*0-9]))?$"
)
_KIND = (
    r"(?:(?:an?|any|some|arbitrary|the|fixed|real|complex|rational|positive|non-?negative|integer|natural|whole)\s+){0,5}"
    r"(?:integers?|constants?|numbers?|reals?|parameters?|integer|real)"
)
_DESCRIBED = re.compile(rf"(?:where|with|for|and)?\s*{_NAMES}\s+(?:(?:is|are|be|being|can be)\s+)?(?P<kind>{_KIND})$")
_FOR_ALL = re.compile(
    rf"for\s+(?:all|any|every|each)\s+(?:(?P<kind>{_KIND}|real|integer|positive)\s*)?{_NAMES}?"
    rf"(?:\s*\\in\s*(?:{_NUMBER_SET}|[A-Z]\b)[\^+*{{}}]{{0,4}}|\s*(?:\\ge|>|\\ne)\s*[0-9]{{1,3}})?$"
)
_COUNTED = re.compile(
    r"(?:where|for|with)?\s*(?P<names>[a-z])\s*=\s*0\s*,\s*\\pm\s*1\s*,\s*\\pm\s*2\s*,?\s*(?:\\[lc]?dots|\.\.\.)\s*$"
)
_CONDITION_START = re.compile(
    r"[,;:(]|(?<=[\s)}])\s*(?=(?:where|when|if|with|for|since|because|attained|achieved|reached)\b)|\s+(?=[A-Za-z]\s*\\in)"
)
_ORDER = re.compile(r"[<>]|\\(?:ge|le|ne)(?![a-z])")
_BOUNDED = re.compile(
    r"(?:where|with|for)?\s*(?:all\s+)?(?:(?P<kind>integers?)\s+)?(?P<names>[A-Za-z])\s*"
    rf"(?P<bound>(?:{_ORDER.pattern})\s*-?[0-9]{{1,4}})$"
)
_GIVEN = re.compile(r"(?:where|when|with|if|for)\s+(?P<names>[a-z])\s*(?P<bound>=\s*-?[0-9.]+)$")
_REASON = re.compile(r"(?:since|because)\s.+$")
_REMARK = re.compile(
    r"\s*\((?:(?:an?|the)\s+[a-z]{3,}|approximately|about|exactly)\b[^()]*\)$|\s+or so$"
    r"|\s+(?:is|are) the only (?:[a-z]+ )?(?:solutions?|values?|answers?|pairs?)$"
)
"""Words at the end that say nothing more."""
_CUT_OFF = re.compile(r"(?<![A-Za-z])(?:for|all|any|every|each|some|where|with)$")
_ATTAINED = re.compile(r"(?:which\s+is\s+|is\s+)?(?:attained|achieved|reached)\b.*$|with\s+equality\b.*$")
_CONJUNCTION = re.compile(r"(?<![A-Za-z\\])(?:and|or)(?![A-Za-z])")
_SEPARATORS = re.compile(r"(?<![A-Za-z\\])(?:and|or|respectively)(?![a-z])|\\(?:lor|vee|land|wedge)(?![A-Za-z])|&|;")
_FOLLOWED = re.compile(
    r"[0-9]\s*(?P<word>[A-Za-z]{3,20}|ft|yd|lb|oz|kg|km|cm|hr|[hm](?=\s+[0-9]+\s+[a-z]))\s+(?=[0-9])"
)
"""A noun between two numbers: `5 feet 3 inches` are two items."""
_OPERATIONS = frozenset(("mod", "times", "plus", "minus", "over", "choose", "divided"))
_EQUALS = re.compile(r"(?<![A-Za-z\\])(?:is equal to|are equal to|equals|equal to|equal|is|are)(?![A-Za-z])")
_LEADING = re.compile(r"((?:[A-Za-z]{2,20}(?:\s*:\s*|\s+)){1,7})(?=[-+0-9\\(.])(?!\\in)")
_APPROXIMATELY = re.compile(r"\\(?:approx|simeq|sim|doteq)(?![a-z])")
_ORDINAL = re.compile(
    r"(?<=[0-9])\s*(?:\^\s*\{?\s*(?:th|st|nd|rd)\s*\}?|(?:th|st|nd|rd)(?![A-Za-z]))|(?<=[A-Za-z)}])\s*\^\s*\{?\s*th\s*\}?"
)
_ARTICLES = re.compile(r"^(?:the|so|thus|hence|therefore|a|an)\s+", re.IGNORECASE)


def statement(text: str) -> Statement | None:
    """Return `text` as a statement; None where its words may say more than its values."""
    plain = _REMARK.sub("", strict_text(text))
    if "mod" not in plain:
        plain = plain.replace("\\equiv", "=")
    domains: dict[str, str] = {}
    while (cut := _last_condition(plain)) is not None:
        plain, said = cut
        domains.update(said)
    parts = split_items(plain)
    if not parts or len(parts) > MAX_ITEMS:
        return None
    items = []
    for part in parts:
        label, body = _labelled(_ORDINAL.sub("", part))
        sides = _APPROXIMATELY.split(body)
        value, noun = split_noun(sides[0].strip() or sides[-1].strip())
        if not value or QUALIFIERS & set(words(part)) or is_false(part):
            return None
        scales = [SCALES[word] for word in words(noun) if word in SCALES]
        noun = " ".join(word for word in noun.split() if word not in SCALES)
        noun = noun or "degrees" * value.endswith("^\\circ")
        items.append(Item(value, label, noun, Fraction(scales[0] if scales else 1)))
    return Statement(tuple(items), domains)


def is_false(equation: str) -> bool:
    """Whether an equation of numbers alone is wrong by more than a rounding."""
    sides = [side for side in map(read_or_none, equation.split("=")) if side is not None and not variables(side)]
    if len(sides) <= equation.count("=") or len(sides) < 2:
        return False
    values = [value for side in sides if isinstance(value := constant_value(side), Fraction)]
    return any(abs(value - values[0]) > abs(values[0]) / 100 for value in values)


def split_items(text: str) -> list[str]:
    """The parts between commas, semicolons, `and` and `or` outside brackets; a number with grouped digits is one."""
    text = without_groups(text)
    if number(text) is not None:
        return [text]
    if "\\begin" not in text:
        text = _FOLLOWED.sub(
            lambda match: match[0] if match["word"].lower() in _OPERATIONS else f"{match[0].rstrip()},",
            _SEPARATORS.sub(",", text),
        )
    return [part for part in top_level(text, ",") if part]


def top_level(text: str, separator: str) -> list[str]:
    """`text` cut at `separator` where no bracket and no environment is open, stripped."""
    parts, depth, start = [], 0, 0
    for index, character in enumerate(text):
        if character in "([{":
            depth += 1
        elif character in ")]}":
            depth -= 1
        elif character == "\\":
            depth += text.startswith(("\\langle", "\\begin"), index) - text.startswith(("\\rangle", "\\end"), index)
        elif character == separator and depth <= 0:
            parts.append(text[start:index].strip())
            start = index + 1
    return [*parts, text[start:].strip()]


def bases(text: str) -> list[str]:
    """The subscripts of numbers, which the parsers would drop."""
    return re.findall(r"[0-9]_\{?([0-9]+)", text)


def brackets(text: str) -> str:
    """The pair of brackets that encloses all of `text`; empty if there is none."""
    if text.startswith("\\{") and text.endswith("\\}"):
        return "\\{\\}"
    if len(text) > 1 and text[0] in "([" and text[-1] in ")]":
        depth = 0
        for index, character in enumerate(text):
            depth += (character in "([{") - (character in ")]}")
            if depth == 0:
                return text[0] + text[-1] if index == len(text) - 1 else ""
    return ""


def elements(text: str) -> list[str]:
    """The parts between commas (or `or`, `and`) outside inner brackets; the whole text if there are none."""
    width = {"\\{\\}": 2, "": 0}.get(brackets(text), 1)
    inner = text[width : len(text) - width] if width else text
    inner = inner if width else _CONJUNCTION.sub(",", inner)
    return top_level(inner, ",")


def _last_condition(text: str) -> tuple[str, dict[str, str]] | None:
    """`text` without the condition on parameters at its end, and what that says."""
    tail_at = max(0, len(text) - 90)
    for start in reversed([tail_at + found.start() for found in _CONDITION_START.finditer(text[tail_at:])]):
        tail = text[start:].strip(" ,;:()[].")
        for pattern in (_MEMBER, _COUNTED, _FOR_ALL, _DESCRIBED, _BOUNDED, _GIVEN, _REASON, _ATTAINED):
            match = pattern.fullmatch(tail)
            rest = text[:start].rstrip(" ,;:([").strip()
            if match is None or not rest or _CUT_OFF.search(rest):
                continue
            # An inequality limits a parameter of `rest`, which does not begin with an inequality itself; what is given
            # says nothing where `rest` has no such letter.
            letters = re.sub(r"\\[A-Za-z]+", " ", rest)
            if pattern is _GIVEN and match["names"] in letters:
                continue
            if pattern is _BOUNDED and (match["names"] not in letters or _ORDER.search(rest.partition(",")[0])):
                continue
            return rest, _domains(match)
    return None


def _domains(match: re.Match[str]) -> dict[str, str]:
    groups = match.groupdict()
    names = re.findall(r"[A-Za-z]", groups.get("names") or "")
    if "set" in groups:
        domain = re.findall("[ZNRQC]", groups["set"])[-1] + re.sub(r"[\^_{}\s]", "", groups.get("sign") or "")
    elif "bound" in groups:
        domain = compact(groups["bound"])
    else:
        kind = groups.get("kind") or ("integer" if match.re is _COUNTED else "")
        if "integer" in kind or "natural" in kind or "whole" in kind:
            domain = "N0" if "negative" in kind else "N" if "positive" in kind or "natural" in kind else "Z"
        elif "constant" in kind or "parameter" in kind or not kind:
            domain = "const"
        else:
            domain = "R+" if "positive" in kind else "C" if "complex" in kind else "Q" if "rational" in kind else "R"
    return {name: {"Z+": "N", "N+": "N", "N*": "N", "Z>0": "N"}.get(domain, domain) for name in names}


def _labelled(part: str) -> tuple[str, str]:
    """The label and the body of an item; of a chain of equations the first and the last side."""
    sides = top_level(part, "=")
    if len(sides) == 1:
        words_for_it = _EQUALS.split(part, maxsplit=1)
        sides = words_for_it if len(words_for_it) == 2 else sides
    if len(sides) > 2:
        # A chain that contradicts itself states nothing.
        first, *others = [read_or_none(_APPROXIMATELY.split(side)[0]) for side in sides[1:]]
        agree = first is not None and all(other is not None and same(first, other) for other in others)
        return (sides[0], sides[-1]) if agree else ("", part)
    if len(sides) == 2:
        label, body = sides[0].strip(), sides[1].strip()
        if number(label) is not None and number(body) is None:
            label, body = body, label
        return _ARTICLES.sub("", label), body
    leading = _LEADING.match(part)
    if leading is not None:
        return leading[1].strip(" :"), part[leading.end() :]
    return "", part

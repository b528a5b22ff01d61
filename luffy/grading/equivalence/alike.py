r"""Rules that recognise answers written differently from their reference.

The rules parse with a small grammar of their own (`expression`) and compare values (`numeric`), in about a millisecond
and without sympy. They only ever answer "the same" or, for names, units and words that math-verify does not look at,
"not the same"; where they do not apply, math-verify decides.

Answers in words are compared here: "there are no solutions" is the empty set, "n is even" is "even". A piecewise
function is its branches in any order.
"""

import re

from luffy.grading.equivalence.expression import read_or_none
from luffy.grading.equivalence.families import same_families, same_residues
from luffy.grading.equivalence.items import contradict, same_statements
from luffy.grading.equivalence.numeric import same
from luffy.grading.equivalence.regions import same_regions
from luffy.grading.equivalence.statement import bases, statement
from luffy.grading.equivalence.text import compact, strict_text
from luffy.grading.equivalence.units import QUALIFIERS, words
from luffy.grading.equivalence.values import matched
from luffy.grading.extract import last_box

_NOTHING = re.compile(
    r"\\(?:varnothing|emptyset)|\\\{\s*\\\}|none|(?:the )?empty set|"
    r"(?:there (?:is|are|exists?) )?no (?:real |integer |such |possible |positive )?"
    r"(?:solutions?|values?|numbers?|integers?|functions?|[a-z])(?: (?:of )?[a-z])?(?: exists?| satisf(?:y|ies))?|"
    r"no solutions? (?:exists?|in (?:real numbers|integers|reals))|"
    r"(?:a )?solutions? (?:does|do) not exist|(?:the )?(?:equation|system) has no (?:real )?solutions?"
)
_FILLER = re.compile(
    r"\b(?:the|an?|all|any|every|each|is|are|must be|be|it|they|that|this|answer|values?|numbers?|player|"
    r"will|wins?|winner|[b-z])\b"
)
_PROSE = re.compile(r"[a-z\- ]+")
"""Words alone; one of them has to have three letters or more."""
_NAME = re.compile(r"(?!\AA)\b[A-Z]\b")
"""A single capital; an A that begins the text may be an article."""
_LETTER = re.compile(r"(?<!')\b(?:[b-z]|a$)\b")
_CASES = re.compile(r"(?P<label>[^=]{1,20}=)?\s*\\begin\s*\{cases\}(?P<rows>.*)\\end\s*\{cases\}\s*\.?", re.DOTALL)
_CONDITION = re.compile(r"^(?:if|for|when|where|,|;|\s)+|(?:,|;|\.|\s)+$", re.IGNORECASE)
_OTHERWISE = re.compile(r"otherwise|else|in all other cases|in other cases")
MAX_BRANCHES = 12
_TIME = re.compile(r"(?P<hour>[0-9]{1,2}:[0-9]{2}) ?(?P<half>[ap])\.? ?m\.?")
_AFTERNOON = re.compile(r"\b([ap])\.?\s?m\b\.?", re.IGNORECASE)


def same_phrases(left: str, right: str) -> bool:
    """Whether two answers in words mean the same: no solution, or the same word or two apart from filler words."""
    times = [_TIME.fullmatch(strict_text(text).lower()) for text in (left, right)]
    if times[0] is not None and times[1] is not None:
        return times[0].groups() == times[1].groups()
    one, other = _plain(left), _plain(right)
    if _NOTHING.fullmatch(one) and _NOTHING.fullmatch(other):
        return True
    if not all(_PROSE.fullmatch(text) and re.search("[a-z]{3}", text) for text in (one, other)):
        return False
    # By single letters they have to name the same: point A, and the variable, which one may leave out.
    capitals, letters = ([pattern.findall(strict_text(text)) for text in (left, right)] for pattern in (_NAME, _LETTER))
    if capitals[0] != capitals[1] or (letters[0] != letters[1] and all(letters)):
        return False
    mine, yours = _content(one), _content(other)
    return mine == yours != []


def same_cases(left: str, right: str) -> bool | None:
    """Whether two piecewise functions have the same branches; None where one of them is not piecewise."""
    one, other = _branches(left), _branches(right)
    if one is None or other is None:
        return None

    def agree(left: tuple[str, str], right: tuple[str, str]) -> bool:
        (found, when), (wanted, condition) = left, right
        if compact(found) != compact(wanted):
            mine, yours = read_or_none(found), read_or_none(wanted)
            if mine is None or yours is None or not same(mine, yours):
                return False
        if compact(when) == compact(condition) or (_OTHERWISE.fullmatch(when) and _OTHERWISE.fullmatch(condition)):
            return True
        return same_regions(when, condition) is True or same_phrases(when, condition)

    return matched(one, other, agree)


def halves_of_day(text: str) -> list[str]:
    """`a` for each a.m. in `text`, `p` for each p.m."""
    return [half.lower() for half in _AFTERNOON.findall(strict_text(text))]


def _plain(text: str) -> str:
    return " ".join(re.sub(r"[.,;:!'\"]", " ", strict_text(text)).lower().split())


def _content(text: str) -> list[str]:
    return [word.removesuffix("s") if len(word) > 3 else word for word in _FILLER.sub(" ", text).split()]


def _branches(text: str) -> list[tuple[str, str]] | None:
    match = _CASES.fullmatch(strict_text(text))
    if match is None:
        return None
    rows = [row.partition("&") for row in re.split(r"\\\\", match["rows"]) if row.strip()]
    if len(rows) > MAX_BRANCHES or not all(mark for _, mark, _ in rows):
        return None
    return [(_CONDITION.sub("", found.strip()), _CONDITION.sub("", when.strip())) for found, _, when in rows]


_RATIO = re.compile(r"(?P<above>[^:,=]+):(?P<below>(?!\s*0)[^:,=]+)")
"""A ratio of two expressions; a text that ends in `:00` is a time instead."""

_ORDER = re.compile("[A-Z]{3,}")
"""Letters that name things in an order, and no product."""
_JUNCTION = re.compile(r"\\(land|wedge|lor|vee)(?![A-Za-z])")

MAX_CHARS = 1000
"""The rules do not apply to longer texts; math-verify decides alone."""


def alike(answer: str, gold: str) -> bool:
    """Whether the rules find that an answer equals its reference."""
    gold = last_box(gold) or gold
    if max(len(answer), len(gold)) > MAX_CHARS:
        return False
    if bases(strict_text(answer)) != bases(strict_text(gold)):
        return False
    # One text may join its parts by the sign of "and", the other by that of "or".
    signs = [{name in ("land", "wedge") for name in _JUNCTION.findall(text)} for text in (answer, gold)]
    if (signs[0] and signs[1] and signs[0] != signs[1]) or _currencies_differ(answer, gold):
        return False
    for rule in (_ratios, same_cases, same_regions, same_residues):
        verdict = rule(answer, gold)
        if verdict is not None:
            return verdict
    if same_phrases(answer, gold):
        return True
    one, other = statement(answer), statement(gold)
    if one is None or other is None:
        return False
    families = same_families(one, other)
    return same_statements(one, other) if families is None else families


def conflicting(answer: str, gold: str) -> bool:
    """Whether names, units or words distinguish two answers with the same numbers."""
    gold = last_box(gold) or gold
    if max(len(answer), len(gold)) > MAX_CHARS:
        return False
    halves = [halves_of_day(text) for text in (answer, gold)]
    if (all(halves) and halves[0] != halves[1]) or _currencies_differ(answer, gold):
        return True
    one_order, other_order = (_ORDER.fullmatch(strict_text(text)) for text in (answer, gold))
    if one_order and other_order and one_order[0] != other_order[0]:
        return True
    said, wanted = (set(words(strict_text(text))) & QUALIFIERS for text in (answer, gold))
    if bool(said) != bool(wanted):
        return True
    one, other = statement(answer), statement(gold)
    return one is not None and other is not None and contradict(one, other)


def _currencies_differ(answer: str, gold: str) -> bool:
    """Whether one text has a dollar sign, and the other gives cents."""
    return any(
        "\\$" in one and "\\$" not in other and not {"cent", "cents"}.isdisjoint(words(strict_text(other)))
        for one, other in ((answer, gold), (gold, answer))
    )


def _ratios(answer: str, gold: str) -> bool | None:
    """Ratios of two expressions: `6:4` is `3:2`."""
    one, other = (_RATIO.fullmatch(strict_text(text)) for text in (answer, gold))
    if one is None or other is None:
        return None
    left, right = (read_or_none(f"({a['above']})({b['below']})") for a, b in ((one, other), (other, one)))
    return None if left is None or right is None else same(left, right)

r"""Answers in words, and piecewise functions.

"There are no solutions" is the empty set, "n is even" is "even"; a piecewise function is its branches in any order.
"""

import re

from luffy.grading.expression import read_or_none
from luffy.grading.numeric import same
from luffy.grading.regions import same_regions
from luffy.grading.strict_text import compact, strict_text
from luffy.grading.values import matched

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
    if not (_is_prose(one) and _is_prose(other)) or not _name_alike(left, right):
        return False
    mine, yours = _content(one), _content(other)
    return mine == yours != []


def same_cases(left: str, right: str) -> bool | None:
    """Whether two piecewise functions have the same branches; None where one of them is not piecewise."""
    one, other = _branches(left), _branches(right)
    if one is None or other is None:
        return None
    return matched(one, other, _same_branches)


def halves_of_day(text: str) -> list[str]:
    """`a` for each a.m. in `text`, `p` for each p.m."""
    return [half.lower() for half in _AFTERNOON.findall(strict_text(text))]


def halves_of_day_differ(left: str, right: str) -> bool:
    """Whether one text says a.m. and the other p.m."""
    one, other = halves_of_day(left), halves_of_day(right)
    return bool(one and other) and one != other


def _plain(text: str) -> str:
    plain = strict_text(text)
    return " ".join(re.sub(r"[.,;:!'\"]", " ", plain).lower().split())


def _is_prose(text: str) -> bool:
    """Whether `text` is words alone, and one of them has three letters or more."""
    return re.fullmatch(r"[a-z\- ]+", text) is not None and re.search("[a-z]{3}", text) is not None


def _name_alike(left: str, right: str) -> bool:
    """Whether two texts name the same things by single letters: point A, and the variable, which one may leave out."""
    capitals, letters = ([pattern.findall(strict_text(text)) for text in (left, right)] for pattern in (_NAME, _LETTER))
    return capitals[0] == capitals[1] and (letters[0] == letters[1] or not all(letters))


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


def _same_branches(left: tuple[str, str], right: tuple[str, str]) -> bool:
    return _same_texts(left[0], right[0]) and _same_conditions(left[1], right[1])


def _same_texts(left: str, right: str) -> bool:
    if compact(left) == compact(right):
        return True
    one, other = read_or_none(left), read_or_none(right)
    return one is not None and other is not None and same(one, other)


def _same_conditions(left: str, right: str) -> bool:
    if compact(left) == compact(right) or (_OTHERWISE.fullmatch(left) and _OTHERWISE.fullmatch(right)):
        return True
    return same_regions(left, right) is True or same_phrases(left, right)

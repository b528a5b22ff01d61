r"""Rules that recognise answers written differently from their reference.

The rules parse with a small grammar of their own (`expression`) and compare values (`numeric`), in about a millisecond
and without sympy. `RULES` only ever answer "the same", `CONFLICTS` "not the same": by names, units, words, and numbers
that cannot be equal. Where neither applies, math-verify decides.

Answers in words are compared here: "there are no solutions" is the empty set, "n is even" is "even". A piecewise
function is its branches in any order. Families with an integer parameter (`\frac{\pi}{6} + k\pi`, `n \equiv 1 \pmod 3`)
are equal if they contain the same numbers, whatever the letter, the shift by a period and the number of families:
`\frac{\pi}{4} + \frac{k\pi}{2}` is `\frac{\pi}{4} + k\pi, \frac{3\pi}{4} + k\pi`.
"""

import itertools
import math
import re
from collections.abc import Callable
from fractions import Fraction
from itertools import pairwise
from typing import NamedTuple

from mpmath import mp

from luffy.grading.equivalence.expression import DEGREE, Expression, Number, read_or_none, substituted, variables
from luffy.grading.equivalence.items import contradict, same_statements
from luffy.grading.equivalence.numeric import NoValueError, close, constant_value, inexact, same, value_of
from luffy.grading.equivalence.numeric import Value as Scalar
from luffy.grading.equivalence.regions import same_regions
from luffy.grading.equivalence.statement import Statement, is_false, split_items, statement
from luffy.grading.equivalence.text import QUALIFIERS, compact, strict_text, words
from luffy.grading.equivalence.values import expansions, matched
from luffy.grading.extract import last_box

_NOTHING = re.compile(
    r"\\(?:varnothing|emptyset)|\\\{\s*\\\}|none|(?:the )?empty set|"
    r"(?:there (?:is|are|exists?) )?no (?:real |integer |such |possible |positive )?"
    r"(?:solutions?|values?|numbers?|integers?|functions?|[a-z])(?: (?:of )?[a-z])?(?: exists?| satisf(?:y|ies))?|"
    r"no solutions? (?:exists?|in (?:real numbers|integers|reals))|"
    r"(?:a )?solutions? (?:does|do) not exist|(?:the )?(?:equation|system) has no (?:real )?solutions?"
)
_INFINITELY_MANY = re.compile(
    r"\+? ?\\infty|infinity|(?:there (?:is|are|exists?) )?(?:an )?(?:infinite(?:ly many)?|infinity)"
    r"(?: (?:number|amount) of)?(?: (?:real|integer|such|possible|positive))?"
    r"(?: (?:solutions?|values?|numbers?|integers?|functions?))?"
    r"(?: (?:of )?[a-z])?(?: exists?)?|(?:the )?(?:equation|system) has infinitely many (?:real )?solutions?"
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
_YES_OR_NO = re.compile(r"(?P<said>yes|no)(?:[.!]*$|[,.;:!] (?!.*\b(?:yes|no|or|and|but|maybe)\b))")
_TIME = re.compile(r"(?P<hour>[0-9]{1,2})(?::(?P<minute>[0-5][0-9]))?(?: ?(?P<half>[ap])\.? ?m\.?)?")
_DATE = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}|[0-9]{1,2}/[0-9]{1,2}/[0-9]{4}")


def same_moments(answer: str, gold: str) -> bool | None:
    """Whether two dates or times of the day are the same; None where a text is neither.

    A reference like 12:30, which a ratio in lowest terms is not, is a time and no quotient.
    """
    mine, yours = strict_text(answer).lower(), strict_text(gold).lower()
    if _DATE.fullmatch(mine) and _DATE.fullmatch(yours):
        return mine == yours
    time, wanted = _clock(mine), _clock(yours)
    if time is not None and wanted is not None and (time[1] or wanted[1]):  # 10 is 10 a.m.
        # Up to one o'clock a time may be of either half.
        is_known = all(half or minutes >= 13 * 60 for minutes, half in (time, wanted))
        return (time[0] - wanted[0]) % (24 * 60 if is_known else 12 * 60) == 0
    if ":" not in yours:
        return None
    hour, minute = divmod(wanted[0], 60) if wanted is not None and not wanted[1] else (1, 60)
    return None if (math.gcd(hour, minute) == 1 and minute > 9) or read_or_none(mine) is None else False


def _clock(text: str) -> tuple[int, str] | None:
    """The minutes since midnight, and the half of the day where a time names it."""
    match = _TIME.fullmatch(text)
    if match is None or int(match["hour"]) > 24:
        return None
    hour, half = int(match["hour"]), match["half"] or ""
    return (hour % 12 + 12 * (half == "p") if half else hour) * 60 + int(match["minute"] or 0), half


def same_phrases(left: str, right: str) -> bool:
    """Whether two answers in words mean the same: no solution, or the same word or two apart from filler words."""
    answers = [_YES_OR_NO.match(strict_text(text).lower()) for text in (left, right)]
    if answers[0] is not None and answers[1] is not None:
        return answers[0]["said"] == answers[1]["said"]
    one, other = _plain(left), _plain(right)
    if any(meaning.fullmatch(one) and meaning.fullmatch(other) for meaning in (_NOTHING, _INFINITELY_MANY)):
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


def _plain(text: str) -> str:
    plain = re.sub(r"[.,;:!'\"]", " ", strict_text(text)).lower()
    return " ".join(re.sub(r"\bdne\b", "does not exist", plain).split())


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


_RATIO = re.compile(r"[^:,=]+(?::(?!\s*0)[^:,=]+)+")

_CURRENCY = re.compile(r"\\\$|[€£¥₹]|(?<![A-Za-z])cent(?=s?(?![A-Za-z]))")
_TO = re.compile(r"(?<=[0-9]) to (?=[0-9])")
_WORD = re.compile("[A-Za-z]{3,}")
_SPACED_WORD = re.compile(r"(?:^|(?<=\s))(?!and\b)[A-Za-z]{3,}(?=[\s,]|$)")
_SIGNS = re.compile(r"[0-9]+(?:\.[0-9]+)?|(?<![A-Za-z\\])[A-Za-z](?![A-Za-z])")
_JUNCTION = re.compile(r"\\(land|wedge|lor|vee)(?![A-Za-z])")

MAX_CHARS = 1000
"""The rules do not apply to longer texts; math-verify decides alone."""


def alike(answer: str, gold: str) -> bool:
    """Whether the rules find that an answer equals its reference."""
    gold = last_box(gold) or gold
    if max(len(answer), len(gold)) > MAX_CHARS:
        return False
    verdicts = (rule(answer, gold) for rule in RULES)
    return next((verdict for verdict in verdicts if verdict is not None), False)


def conflicting(answer: str, gold: str) -> bool:
    """Whether names, units, words or numbers certainly distinguish two answers."""
    has_one_box = gold.count("\\boxed") < 2  # math-verify takes all of several
    gold = last_box(gold) or gold
    if max(len(answer), len(gold)) > MAX_CHARS:
        return False
    return any(rule(answer, gold) for rule in CONFLICTS if has_one_box or rule is not _statements_contradict)


def _junctions_agree(answer: str, gold: str) -> bool | None:
    """False where one text joins its parts by the sign of "and", the other by that of "or"."""
    signs = [{name in ("land", "wedge") for name in _JUNCTION.findall(text)} for text in (answer, gold)]
    return False if signs[0] and signs[1] and signs[0] != signs[1] else None


def _phrases(answer: str, gold: str) -> bool | None:
    return True if same_phrases(answer, gold) else False if _are_other_words(answer, gold) else None


def _statements(answer: str, gold: str) -> bool | None:
    one, other = statement(answer), statement(gold)
    if one is None or other is None:
        return None
    families = same_families(one, other)
    return same_statements(one, other) if families is None else families


def _are_at_other_times(answer: str, gold: str) -> bool:
    return same_moments(answer, gold) is False


def _are_other_ratios(answer: str, gold: str) -> bool:
    return _ratios(answer, gold) is False


def _are_qualified(answer: str, gold: str) -> bool:
    """Whether one text has a word such as "at most", or they name the two halves of the day."""
    said, wanted = (set(words(strict_text(text))) & QUALIFIERS for text in (answer, gold))
    halves = {"am", "pm"}
    return bool(said - halves) != bool(wanted - halves) or halves <= said ^ wanted


def _is_wrong_arithmetic(answer: str, gold: str) -> bool:
    return any(map(is_false, split_items(strict_text(answer))))


def _statements_contradict(answer: str, gold: str) -> bool:
    one, other = statement(answer), statement(gold)
    return one is not None and other is not None and contradict(one, other)


def _are_told_otherwise(answer: str, gold: str) -> bool:
    """Whether items with words have other numbers or letters, or these in another order, as in "5 out of 7"."""
    texts = [[_last_side(part) for part in split_items(strict_text(text))] for text in (answer, gold)]
    spoken = [any(map(_SPACED_WORD.search, parts)) for parts in texts]
    if not any(spoken) or not any(_SIGNS.search(part) for parts in texts for part in parts):
        return False
    mine, yours = (
        sorted((_SIGNS.findall(part), _SPACED_WORD.findall(part.lower()) * all(spoken)) for part in parts)
        for parts in texts
    )
    return mine != yours


def _last_side(part: str) -> str:
    """What a chain of equations ends with; all of it with words inside: `f(x) = 5 \\text{ when } x = 3`."""
    sides = part.split("=")
    return part if any(map(_SPACED_WORD.search, sides[1:-1])) else sides[-1]


def currencies_differ(answer: str, gold: str) -> bool:
    """Whether two texts have signs of other currencies, or one has a dollar sign and the other gives cents."""
    one, other = (set(_CURRENCY.findall(text)) for text in (answer, gold))
    return bool(one and other and not one & other)


def _are_other_words(answer: str, gold: str) -> bool:
    """Whether both texts are words that differ: upright, in capitals, or with an "o", which is no variable."""
    left, right = strict_text(answer), strict_text(gold)
    if not (_WORD.fullmatch(left) and _WORD.fullmatch(right)) or left.lower() == right.lower():
        return False
    return "{" in answer + gold or "o" in left.lower() or (left.isupper() and right.isupper())


def _ratios(answer: str, gold: str) -> bool | None:
    """Ratios of expressions: `6:4` is `3:2`."""
    texts = [strict_text(text).replace("\\colon", ":") for text in (answer, gold)]
    one, other = (_TO.sub(":", text) if ":" in "".join(texts) else text for text in texts)
    if not (_RATIO.fullmatch(one) and _RATIO.fullmatch(other)):
        return None
    mine, yours = one.split(":"), other.split(":")
    products = [
        (read_or_none(f"({mine[0]})({b})"), read_or_none(f"({yours[0]})({a})"))
        for a, b in zip(mine, yours, strict=False)
    ]
    read = [(left, right) for left, right in products if left is not None and right is not None]
    if len(read) < len(products):
        return None
    return len(mine) == len(yours) and all(same(left, right) for left, right in read)


MAX_RESIDUES = 240
"""Most residues, in the common period of all families of an answer, that are compared."""
_PARAMETERS = frozenset("knmltp")
_CONGRUENCE = re.compile(r"(?P<residues>.+?)\s*\(?\s*\\(?:pmod|bmod|mod)\s*\{?\s*(?P<modulus>[0-9]{1,6})\s*\}?\s*\)?$")
_PARITY = re.compile(
    r"(?:all|any|every)?\s*(?:[a-z]\s+(?:is|are|must be)\s+)?(?:an?\s+)?(?:all\s+)?(?:positive\s+)?(?P<parity>odd|even)"
    r"(?:\s+(?:positive\s+)?(?:integers?|numbers?|natural numbers?|values?))?(?:\s+(?:of\s+)?[a-z])?"
)


class Family(NamedTuple):
    """The numbers `offset + k period` for all integers `k`."""

    offset: Scalar
    period: Scalar


def same_families(left: Statement, right: Statement) -> bool | None:
    """Whether two statements list the same families; None where one of them lists anything else."""
    one, other = _families(left, right), _families(right, left)
    names = {item.label for stated in (left, right) for item in stated.items if item.label}
    if one is None or other is None or len(names) > 1:
        return None
    if not {*left.domains.values(), *right.domains.values()} <= {"Z"}:
        return None
    return _covers(one, other)


def same_residues(left: str, right: str) -> bool | None:
    """Whether two texts, one of them a congruence or a parity in words, hold the same integers; None for others."""
    if not any("mod" in text or _PARITY.fullmatch(strict_text(text).lower()) for text in (left, right)):
        return None
    one, other = (_residues(text) for text in (left, right))
    return None if one is None or other is None else _covers(one, other)


def _residues(text: str) -> list[Family] | None:
    """The families of a congruence, a parity in words, or a list of integers with one parameter."""
    plain = strict_text(text)
    parity = _PARITY.fullmatch(plain.lower())
    if parity is not None:
        return [Family(Fraction(parity["parity"] == "odd"), Fraction(2))]
    congruence = _CONGRUENCE.fullmatch(plain.replace("\\equiv", "="))
    if congruence is not None and (modulus := Fraction(congruence["modulus"])):
        parts = split_items(congruence["residues"].rpartition("=")[2])
        values = [constant_value(read) for part in parts if (read := read_or_none(part)) is not None]
        if parts and len(values) == len(parts) and None not in values:
            return [Family(found, modulus) for found in values]
    stated = statement(text)
    return None if stated is None else _families(stated, integers=True)


def _families(stated: Statement, beside: Statement | None = None, integers: bool = False) -> list[Family] | None:
    with mp.workdps(60):
        is_beside_pi = beside is not None and any("\\pi" in item.body for item in beside.items)
        point = {DEGREE: mp.pi / 180 if is_beside_pi else Fraction(1)}
    families: list[Family] = []
    for text in (text for item in stated.items for text in expansions(item.body)[0]):
        expression = read_or_none(text)
        parameter = None if expression is None else _parameter(expression, stated, integers)
        if expression is None or parameter is None:
            return None
        try:
            values = [value_of(substituted(expression, {parameter: Number(Fraction(k))}), point) for k in range(6)]
        except NoValueError:
            return None
        with mp.workdps(60):
            steps = [_minus(after, before) for before, after in pairwise(values)]
            double = [_minus(after, before) for before, after in zip(values, values[2:], strict=False)]
        if steps[0] != 0 and all(close(step, steps[0]) for step in steps):
            families.append(Family(values[0], steps[0]))
        elif double[0] != 0 and all(close(step, double[0]) for step in double):  # even and odd apart, as in `(-1)^k`
            families += [Family(values[0], double[0]), Family(values[1], double[0])]
        else:
            return None
    return families or None


def _parameter(expression: Expression, stated: Statement, integers: bool) -> str | None:
    """The letter of the integer parameter: one that the statement declares, or one beside `\\pi` or degrees."""
    names = variables(expression) - {DEGREE}
    if len(names) != 1:
        return None
    name = next(iter(names))
    if stated.domains.get(name) == "Z":
        return name
    is_angular = "pi" in str(expression) or DEGREE in variables(expression)
    return name if name in _PARAMETERS and name not in stated.domains and (is_angular or integers) else None


def _minus(left: Scalar, right: Scalar) -> Scalar:
    if isinstance(left, Fraction) and isinstance(right, Fraction):
        return left - right
    return inexact(left) - inexact(right)


def _covers(left: list[Family], right: list[Family]) -> bool:
    """Whether two lists hold the same numbers: as residues of their common period."""
    with mp.workdps(60):
        unit = inexact(left[0].period)
        periods = []
        for ratio in (inexact(family.period) / unit for family in (*left, *right)):
            if abs(ratio.imag) > 0 or not abs(ratio) < 10**6:
                return False
            period = Fraction(str(mp.nstr(ratio.real, 40))).limit_denominator(1000)
            if period == 0 or abs(inexact(period) - ratio) >= mp.mpf(10) ** -30:
                return False
            periods.append(abs(period))
        whole = Fraction(
            math.lcm(*(each.numerator for each in periods)), math.gcd(*(each.denominator for each in periods))
        )
        if sum(whole / period for period in periods) > MAX_RESIDUES:
            return False
        spread = [
            [inexact(family.offset) / unit + inexact(index * period) for index in range(int(whole / period))]
            for family, period in zip((*left, *right), periods, strict=True)
        ]
        one, other = (list(itertools.chain(*of_side)) for of_side in (spread[: len(left)], spread[len(left) :]))
        return all(any(_congruent(a, b, whole) for b in other) for a in one) and all(
            any(_congruent(a, b, whole) for a in one) for b in other
        )


def _congruent(left: Scalar, right: Scalar, whole: Fraction) -> bool:
    turns = (left - right) / inexact(whole)
    return bool(abs(turns - mp.nint(turns.real)) < mp.mpf(10) ** -40)


RULES: tuple[Callable[[str, str], bool | None], ...] = (
    _junctions_agree,
    same_moments,
    _ratios,
    same_cases,
    same_regions,
    same_residues,
    _phrases,
    _statements,
)
"""The first that does not return None decides."""
CONFLICTS: tuple[Callable[[str, str], bool], ...] = (
    currencies_differ,
    _are_at_other_times,
    _are_other_ratios,
    _are_qualified,
    _are_told_otherwise,
    _are_other_words,
    _is_wrong_arithmetic,
    _statements_contradict,
)

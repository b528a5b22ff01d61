r"""Rules that recognise answers written differently from their reference.

The rules parse with a small grammar of their own (`expression`) and compare values (`numeric`), in about a millisecond
and without sympy. They only ever answer "the same" or, for names, units and words that math-verify does not look at,
"not the same"; where they do not apply, math-verify decides.
"""

import re

from luffy.grading.expression import read_or_none
from luffy.grading.extract import last_box
from luffy.grading.families import is_congruence, same_families, same_residues
from luffy.grading.lists import contradict, same_statements
from luffy.grading.math_strict import bases
from luffy.grading.numeric import same
from luffy.grading.phrases import halves_of_day_differ, same_cases, same_phrases
from luffy.grading.regions import same_regions
from luffy.grading.statement import statement
from luffy.grading.strict_text import strict_text
from luffy.grading.units import QUALIFIERS, words

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
    if _joined_otherwise(answer, gold) or _currencies_differ(answer, gold):
        return False
    for rule in (_ratios, same_cases, same_regions, _congruences):
        verdict = rule(answer, gold)
        if verdict is not None:
            return verdict
    return same_phrases(answer, gold) or _statements(answer, gold)


def conflicting(answer: str, gold: str) -> bool:
    """Whether names, units or words distinguish two answers with the same numbers."""
    gold = last_box(gold) or gold
    if max(len(answer), len(gold)) > MAX_CHARS:
        return False
    if halves_of_day_differ(answer, gold) or _currencies_differ(answer, gold):
        return True
    one_order, other_order = (_ORDER.fullmatch(strict_text(text)) for text in (answer, gold))
    if one_order and other_order and one_order[0] != other_order[0]:
        return True
    said, wanted = (set(words(strict_text(text))) & QUALIFIERS for text in (answer, gold))
    if bool(said) != bool(wanted):
        return True
    one, other = statement(answer), statement(gold)
    return one is not None and other is not None and contradict(one, other)


def _joined_otherwise(answer: str, gold: str) -> bool:
    """Whether one text joins its parts by the sign of "and", the other by that of "or"."""
    signs = [{name in ("land", "wedge") for name in _JUNCTION.findall(text)} for text in (answer, gold)]
    return bool(signs[0] and signs[1]) and signs[0] != signs[1]


def _currencies_differ(answer: str, gold: str) -> bool:
    """Whether one text has a dollar sign, and the other gives cents."""
    return any(
        "\\$" in one and "\\$" not in other and not {"cent", "cents"}.isdisjoint(words(strict_text(other)))
        for one, other in ((answer, gold), (gold, answer))
    )


def _statements(answer: str, gold: str) -> bool:
    one, other = statement(answer), statement(gold)
    if one is None or other is None:
        return False
    families = same_families(one, other)
    return same_statements(one, other) if families is None else families


def _congruences(answer: str, gold: str) -> bool | None:
    """A congruence or a parity in words against another, or against `3k + 1`."""
    if not (is_congruence(answer) or is_congruence(gold)):
        return None
    return same_residues(answer, gold)


def _ratios(answer: str, gold: str) -> bool | None:
    """Ratios of two expressions: `6:4` is `3:2`."""
    found = [_RATIO.fullmatch(strict_text(text)) for text in (answer, gold)]
    if found[0] is None or found[1] is None:
        return None
    products = [
        read_or_none(f"({one['above']})({other['below']})")
        for one, other in ((found[0], found[1]), (found[1], found[0]))
    ]
    if products[0] is None or products[1] is None:
        return None
    return same(products[0], products[1])

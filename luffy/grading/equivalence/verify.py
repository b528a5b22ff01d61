"""Mathematical equality by this package's rules, then by math-verify. Runs only in a worker process.

math-verify's own time-outs rest on SIGALRM: they fail off the main thread, reset other people's alarms and do not
stop a computation inside a C extension. They are switched off here; the parent's deadline is the only one.

The rules (`alike`) come first: they are cheap and only say yes. math-verify decides the rest. Where it is
known to be wrong (`tests/unit/grading/test_verdicts.py` lists the cases), it is given a text that it can read, or
its yes is checked again: it compares to six decimals, reads capitals as small letters (`R - r` is 0), drops primes,
and takes a set for a tuple. Words are factors to it.
"""

import re
from collections.abc import Callable, Sequence
from fractions import Fraction

from latex2sympy2_extended.math_normalization import NormalizationConfig
from math_verify import LatexExtractionConfig, parse, verify
from sympy import Basic, Expr, MatrixBase, N

from luffy.grading.equivalence.alike import alike, conflicting, currencies_differ
from luffy.grading.equivalence.certain import normalise
from luffy.grading.equivalence.expression import DEGREE, read_or_none, variables
from luffy.grading.equivalence.math_strict import strictly_equal
from luffy.grading.equivalence.statement import bases, brackets, elements
from luffy.grading.equivalence.text import (
    compact,
    number,
    readable,
    split_noun,
    strict_text,
    unadorned,
    without_unit,
    without_upright_units,
    without_variable,
    words,
)
from luffy.grading.extract import last_box
from luffy.types import Outcome

_EXTRACTION = (
    LatexExtractionConfig(
        boxed_match_priority=0,
        # As units, all words after a number would vanish, and other numbers between them.
        normalization_config=NormalizationConfig(units=False, malformed_operators=True, nits=True),
    ),
)
_TINY = 1e-3
_RELATIVE = 1e-6
_FAR = Fraction(1, 10)
"""No rounding makes two numbers equal that differ by more."""
_PRIME = re.compile(r"([A-Za-z)}'])(?='|\s*\^?\{?\\prime)")
_PRIMES = re.compile(r"\s*\^\s*(?:\{\s*(?:\\prime\s*)+\}|\\prime(?![a-z]))")
_D = r"(?:\\(?:mathrm|text)\s*\{\s*d\s*\}|\\partial|d)"
_DERIVATIVE = re.compile(
    rf"\\[dt]?frac\s*\{{\s*{_D}\s*(?:\^\s*\{{?(?P<order>[2-9])\}}?\s*)?(?P<function>[A-Za-z])\s*\}}"
    rf"\s*\{{\s*{_D}\s*(?P<variable>[A-Za-z])\s*(?(order)\^\s*\{{?(?P=order)\}}?)\s*\}}"
    r"|(?<![A-Za-z\\])d(?P<above>[A-Za-z])\s*/\s*d(?P<below>[A-Za-z])(?![A-Za-z])"
    r"|\\(?P<dots>d{1,3})ot(?![a-z])\s*\{?\s*(?P<moving>[A-Za-z])\s*\}?"
)
"""A derivative in another notation than primes."""
_LABEL = re.compile(r"\(?[A-Za-z]\)?")
_UNIT_LETTER = re.compile(r"(?P<value>-?[0-9.,]+) ?(?P<unit>\^\\circ ?[CFK]|[CFmgsLNJWVKhl])")
"""A number and a unit of one letter: `5m`, `20^\\circ C`."""
_DROPPED_UNIT = re.compile(r"(?P<value>-?[0-9.,]+)[mgshl]")
_RUN = re.compile(r"\\[A-Za-z]+|(?<![A-Za-z])[A-Za-z]{1,3}(?![A-Za-z])")
"""A command, or a few letters, which are a product."""
Parsed = Sequence[Basic | MatrixBase | str]


def verify_answer(answer: str, ground_truth: str) -> Outcome:
    """Return `CORRECT`, `WRONG`, or `UNPARSABLE` where either side cannot be read as mathematics.

    May take forever, exhaust its memory or crash the interpreter: `9^{9^{9^9}}` is a legal answer.
    """
    answer = unadorned(answer)
    known = _by_money(answer, ground_truth)
    if known is not None:
        return known
    if currencies_differ(answer, last_box(ground_truth) or ground_truth):
        return Outcome.WRONG
    for rule in (without_upright_units, with_primes):
        pair = rule(answer, ground_truth)
        if pair is None:
            return Outcome.WRONG
        answer, ground_truth = pair
    known = _by_text(*_without_unit_letter(answer, ground_truth))
    if known is not None:
        return known
    if alike(answer, ground_truth):
        return Outcome.CORRECT
    gold, target = _parse(ground_truth), _parse(answer)
    if verify(gold, target, timeout_seconds=None, allow_set_relation_comp=True):
        is_vetoed = conflicting(answer, ground_truth) or _disagree(answer, ground_truth, gold, target)
        return Outcome.WRONG if is_vetoed else Outcome.CORRECT
    are_read = all(any(isinstance(value, Basic | MatrixBase) for value in parsed) for parsed in (gold, target))
    return Outcome.WRONG if are_read or conflicting(answer, ground_truth) else Outcome.UNPARSABLE


def _without_unit_letter(answer: str, ground_truth: str) -> tuple[str, str]:
    """Both texts, one that is a number directly before the letter of a unit without it beside a number: `5m` is 5."""
    mine, yours = (_DROPPED_UNIT.fullmatch(strict_text(text)) for text in (answer, ground_truth))
    if mine is not None and yours is None:
        return mine["value"], ground_truth
    return (answer, yours["value"]) if mine is None and yours is not None else (answer, ground_truth)


def _by_money(answer: str, ground_truth: str) -> Outcome | None:
    """The verdict on cents beside dollars, which a reference need not name: 75 cents are 0.75; None without them."""
    amounts = []
    for text in (answer, ground_truth):
        bare, noun = split_noun(strict_text(text))
        unit = "dollars" if "\\$" in text and not noun else noun.rstrip("s") + "s" if noun else ""
        amount = None if "%" in bare else number(bare)
        amounts.append((unit, amount if amount is None or unit == "cents" else amount * 100))
    (unit, amount), (wanted, reference) = amounts
    if amount is None or reference is None or {unit, wanted} not in ({"cents", "dollars"}, {"cents", ""}):
        return None
    if amount == reference and unit:
        return Outcome.CORRECT
    return Outcome.WRONG if unit and wanted else None


def with_primes(answer: str, ground_truth: str) -> tuple[str, str] | None:
    """Both texts with derivatives as primes, `y'` for `\\frac{dy}{dx}` and `\\dot{y}`; None if by other variables.

    They stay as they are where only one has derivatives, or the reference does not have the variable of the answer's.
    """
    (mine, by), (yours, wanted) = _primed(answer), _primed(ground_truth)
    if not (by or wanted) or "'" not in mine or "'" not in yours:
        return answer, ground_truth
    if any(by[name] != wanted[name] for name in by.keys() & wanted.keys()):
        return None
    stated = set().union(*by.values(), *wanted.values())
    if any(variable[0] not in yours for name in by.keys() - wanted.keys() for variable in by[name]):
        return answer, ground_truth
    mine, yours = (re.sub(rf"(?<=')\s*\(([{''.join(stated)}])\)", "", text) for text in (mine, yours))  # y'(x)
    return mine, yours


def _primed(text: str) -> tuple[str, dict[str, set[str]]]:
    """`text` with primes, and the variables by which it differentiates each function."""
    by: dict[str, set[str]] = {}

    def primes(match: re.Match[str]) -> str:
        name = match["function"] or match["above"] or match["moving"]
        marks = "'" * (len(match["dots"] or "") or int(match["order"] or 1))
        variable = match["variable"] or match["below"] or "t"
        # With several variables, primes do not say by which one is derived twice.
        by.setdefault(name, set()).add(variable + marks if "partial" in match[0] else variable)
        return f"{name}{marks} "

    text = _PRIMES.sub(lambda match: "'" * match[0].count("prime"), text)
    return _DERIVATIVE.sub(primes, text), by


def _by_text(answer: str, ground_truth: str) -> Outcome | None:
    """The verdict on equal texts and on two numbers that are equal, or far from it; None where math-verify decides.

    It saves parsing LaTeX, which takes most of the time of a grade.
    """
    left, right = strict_text(answer), strict_text(ground_truth)
    if left and compact(left) == compact(right):
        return Outcome.CORRECT
    if "%" in left + right:
        # A number above one may be meant as a percentage: 12.5 is 12.5 \%, where 0.2 is 20 \%.
        one, other = (number(text.removesuffix("%").removesuffix("\\")) for text in (left, right))
        is_same = one is not None and one == other and abs(one) > 1
        return Outcome.CORRECT if is_same or number(left) == number(right) is not None else None
    parts, wanted = [left], [right]
    if brackets(left) == brackets(right) and brackets(left) not in ("", "\\{\\}"):
        parts, wanted = elements(left), elements(right)
    mine, yours = ([found for part in side if (found := number(part)) is not None] for side in (parts, wanted))
    if not len(parts) == len(wanted) == len(mine) == len(yours):
        return None
    if mine == yours:
        return Outcome.CORRECT
    pairs = zip(mine, yours, strict=True)
    return Outcome.WRONG if any(abs(one - other) > _FAR * max(abs(one), abs(other)) for one, other in pairs) else None


def _parse(text: str) -> Parsed:
    # A reference may be a whole solution, with boxes of its own.
    boxed = text if "\\boxed" in text else f"\\boxed{{{normalise(readable(text))}}}"
    return parse(boxed, extraction_config=_EXTRACTION, parsing_timeout=None)


def _disagree(answer: str, ground_truth: str, gold: Parsed, target: Parsed) -> bool:
    """Whether two sides that math-verify considers equal differ in something that it ignores."""
    left, right = strict_text(answer), strict_text(last_box(ground_truth) or ground_truth)
    return any(guard(left, right) for guard in GUARDS) or _are_small_and_apart(gold, target)


def _brackets_differ(left: str, right: str) -> bool:
    return "," in left and {brackets(left), brackets(right)} == {"()", "\\{\\}"}


def _bases_differ(left: str, right: str) -> bool:
    return bool(bases(left) and bases(right)) and bases(left) != bases(right)


def _primes_differ(left: str, right: str) -> bool:
    mine, yours = _PRIME.findall(left), _PRIME.findall(right)
    return len(mine) != len(yours) or set(mine) != set(yours)


def _are_small_and_apart(gold: Parsed, target: Parsed) -> bool:
    """Whether small constants differ in more than their last digits: six decimals see no difference there."""
    values = [value for value in (*gold[:1], *target[:1]) if isinstance(value, Expr) and not value.free_symbols]
    small = [N(value.doit(), 30) for value in values]
    if len(small) < 2 or not all(each.is_Number and each.is_finite for each in small):
        return False  # sympy leaves `42 \bmod 43` as it is
    size = max(map(abs, small))
    return bool(size < _TINY and abs(small[0] - small[1]) > _RELATIVE * size)


def _symbols_differ(left: str, right: str) -> bool:
    """Whether two sides have other variables, or differ once capitals and small letters are told apart."""
    if (_LABEL.fullmatch(left) and _LABEL.fullmatch(right)) or {"am", "pm"} & set(words(left)):
        return False  # the case of an option's label does not matter, nor does that of "AM"
    # Other variables, as in `2ab` and 2; letters that are a unit are none.
    units = [_UNIT_LETTER.fullmatch(text) for text in (left, right)]
    if units[0] and units[1]:
        if units[0]["unit"] != units[1]["unit"]:
            return True
    else:
        texts = zip(units, (left, right), strict=True)
        one, other = (read_or_none(split_noun(unit["value"] if unit else text)[0]) for unit, text in texts)
        if one is not None and other is not None and variables(one) - {DEGREE} != variables(other) - {DEGREE}:
            return True
    # A variable is there as a capital and as a small letter, apart from a name before an equals sign.
    runs = [run for text in (left, right) for run in _RUN.findall(without_unit(without_variable(text))[0])]
    symbols = {symbol for run in runs for symbol in ([run] if run.startswith("\\") else run)}
    mixes_cases = len({symbol.lower() for symbol in symbols}) < len(symbols)
    return mixes_cases and strictly_equal(left, right)[0] is not Outcome.CORRECT


GUARDS: tuple[Callable[[str, str], bool], ...] = (
    _brackets_differ,
    _bases_differ,
    _primes_differ,
    _symbols_differ,
)
"""What math-verify ignores."""

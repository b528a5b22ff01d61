r"""Sets of real numbers: intervals, inequalities, set builders, unions, differences and their words.

`(-\infty, 2) \cup (2, \infty)`, `\mathbb{R} \setminus \{2\}`, `x \ne 2`, `\{x \mid x \ne 2\}` and "all real numbers
except 2" are the same set. A set is stored as its sorted boundary points and the membership of each point and each gap,
so that union, intersection and difference are the same three lines. Ends with a variable are compared as expressions if
each side is a single interval.
"""

import re
from bisect import bisect_left
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import NamedTuple

from mpmath import mp

from luffy.grading.equivalence.expression import read_or_none
from luffy.grading.equivalence.numeric import Value, close, constant_value, inexact, same
from luffy.grading.equivalence.statement import brackets, top_level
from luffy.grading.equivalence.text import strict_text

MAX_PIECES = 40
MAX_INTEGERS = 200
_SIGNS = re.compile(r"\\(?:le|ge|ne|lt|gt)(?![a-z])|<=|>=|!=|<|>")
_CANONICAL = {
    **dict.fromkeys(("\\le", "<="), "<="),
    **dict.fromkeys(("\\ge", ">="), ">="),
    **dict.fromkeys(("\\ne", "!="), "!="),
    **dict.fromkeys(("\\lt", "<"), "<"),
    **dict.fromkeys(("\\gt", ">"), ">"),
}
_MIRRORED = {"<=": ">=", ">=": "<=", "<": ">", ">": "<", "!=": "!="}
_EVIDENT = re.compile(
    r"\\(?:[lg]eq?(?:slant|q)?|neq?|lt|gt|in|cup|cap|setminus|backslash|mathbb|mid|infty|varnothing|emptyset)(?![a-z])|[<>]"
    r"|real numbers|all reals"
)
_BUILDER = re.compile(
    r"\\\{\s*(?P<member>[^|:]{1,40}?)\s*(?:\\mid|\\vert|\||:|such that)\s*(?P<condition>.+)\\\}", re.DOTALL
)
_NAME = re.compile(r"[A-Za-z](?:_\{?[A-Za-z0-9]+\}?)?|\\(?:alpha|beta|gamma|lambda|mu|theta|phi|varphi)")
_MEMBER = re.compile(rf"(?P<name>{_NAME.pattern})\s*\\in\s*(?P<set>.+)", re.DOTALL)
_REALS = re.compile(
    r"\\mathbb\s*\{?\s*R\s*\}?|(?:the set of )?(?:all )?(?:the )?(?:real numbers|reals)(?: [a-z])?|R|any real number"
)
_HALF = re.compile(r"\\mathbb\s*\{?\s*R\s*\}?\s*\^\s*\{?\s*[+-]\s*\}?|(?:all )?positive (?:real numbers|reals)")
_EXCEPT = re.compile(
    r"(?:all )?(?:the )?(?:real numbers|reals)(?: [a-z])?,?\s*(?:except|other than|not equal to|excluding)\s*"
    r"(?:for )?(?:[a-z]\s*=)?\s*(?P<points>.+)"
)
_INTEGERS = re.compile(r"\\mathbb\s*\{?\s*(?P<set>[ZN])\s*\}?(?P<sign>(?:\^\{?[+*]\}?|_\{?[+>0]+\}?)?)")
_ABSOLUTE = re.compile(r"\|(?P<inside>[^|]+)\|")
_CALLED = re.compile(r"^[A-Za-z](?:_\{?[A-Za-z0-9]\}?|\([a-z]\))?\s*=\s*(?=[\[(\\][^=<>]*$)")
_ALL = re.compile(
    r"^(?:all|any|every)\s+(?:positive\s+)?(?:integers?|real numbers?|reals?|numbers?|values of)\s+(?=[a-z](?![a-z]))"
)
_EQUATION = re.compile(rf"(?P<name>{_NAME.pattern})\s*=\s*(?P<point>[^=<>]+)")
_OR = re.compile(r"(?<![A-Za-z\\])or(?![A-Za-z])|\\(?:lor|vee)(?![a-z])")
_AND = re.compile(r"(?<![A-Za-z\\])and(?![A-Za-z])|\\(?:land|wedge)(?![a-z])")
_CUP, _CAP = re.compile(r"\\cup(?![a-z])"), re.compile(r"\\cap(?![a-z])")
_WITHOUT = re.compile(r"\\(?:setminus|backslash)(?![a-z])|\\\\|-(?=\s*\\\{)")


class NoRegionError(ValueError):
    """The text is not a set of real numbers."""


class Region(NamedTuple):
    """Boundary points in order, and membership of what lies between and on them: gap, point, gap, ..., gap."""

    points: tuple[Value, ...]
    inside: tuple[bool, ...]


class NamedRegion(NamedTuple):
    """A region and the variable it was given for; no name where the text has none."""

    region: Region
    name: str = ""


def same_regions(left: str, right: str) -> bool | None:
    """Whether two texts are the same set of real numbers; None where one is not a set, or neither evidently is."""
    if not (_EVIDENT.search(left) or _EVIDENT.search(right)):
        return None
    one, other = strict_text(left), strict_text(right)
    with mp.workdps(60):
        try:
            mine, yours = _named(one), _named(other)
            if mine.name and yours.name and mine.name != yours.name:
                return False
            return _combined([mine.region, yours.region], lambda inside: inside[0] != inside[1]).inside == (False,)
        except NoRegionError:  # two intervals, perhaps with variables in their ends
            left_ends, right_ends = _ends(one), _ends(other)
        if left_ends is None or right_ends is None or left_ends.kind != right_ends.kind:
            return None
        if left_ends.name and right_ends.name and left_ends.name != right_ends.name:
            return None
        pairs = ((left_ends.low, right_ends.low), (left_ends.high, right_ends.high))
        read = [(read_or_none(a), read_or_none(b)) for a, b in pairs]
        return all(a is not None and b is not None and same(a, b) for a, b in read)


def _named(text: str) -> NamedRegion:
    text = text.strip()
    for sign, decide in ((_CUP, any), (_CAP, all), (_WITHOUT, _in_the_first_alone)):
        pieces = _pieces(text, sign)
        if len(pieces) > MAX_PIECES:
            raise NoRegionError("too many pieces")
        if len(pieces) > 1:
            if len(_pieces(text, _OR)) > 1 or len(_pieces(text, _AND)) > 1:
                raise NoRegionError("words between sets and signs")
            found = [_named(piece) for piece in pieces]
            names = {each.name for each in found if each.name}
            if len(names) > 1:
                raise NoRegionError("sets of several variables")
            return NamedRegion(_combined([each.region for each in found], decide), "".join(names))
    if text.startswith("\\{") and text.endswith("\\}") and (builder := _BUILDER.fullmatch(text)) is not None:
        return NamedRegion(_built(builder["member"].strip(), builder["condition"].strip()))
    text = _ALL.sub("", _CALLED.sub("", text))
    member = _MEMBER.fullmatch(text)
    if member is not None and not _OR.search(text) and not _SIGNS.search(text):
        if _MEMBER.match(member["set"]):
            raise NoRegionError(text)
        return _named(member["set"])._replace(name=member["name"])
    return _from_conditions(text) if _SIGNS.search(text) else NamedRegion(_set(text))


def _pieces(text: str, sign: re.Pattern[str]) -> list[str]:
    """`text` cut at the signs outside brackets."""
    pieces, start, depth, counted = [], 0, 0, 0
    for found in sign.finditer(text):
        between = text[counted : found.start()]
        depth += sum(between.count(mark) for mark in "([{") - sum(between.count(mark) for mark in ")]}")
        counted = found.start()
        if depth == 0:
            pieces.append(text[start : found.start()])
            start = found.end()
    return [*pieces, text[start:]]


def _built(member: str, condition: str) -> Region:
    typed = _MEMBER.fullmatch(member)
    name = typed["name"] if typed is not None else member
    if _NAME.fullmatch(name) is None:
        raise NoRegionError(member)
    found = _from_conditions(condition) if _SIGNS.search(condition) else _named(condition)
    if found.name != name:
        raise NoRegionError(condition)
    region, kind = found.region, _INTEGERS.fullmatch(typed["set"].strip()) if typed is not None else None
    if kind is None:
        if typed is not None and not _REALS.fullmatch(typed["set"].strip()):
            raise NoRegionError(member)
        return region
    if not region.points or region.inside[-1] or (region.inside[0] and kind["set"] == "Z"):
        raise NoRegionError("infinitely many integers")
    low = 1 if kind["set"] == "N" else int(mp.ceil(inexact(region.points[0]))) - 1
    low = max(low, 1) if kind["sign"] else low
    high = int(mp.floor(inexact(region.points[-1]))) + 1
    if high - low > MAX_INTEGERS:
        raise NoRegionError("too many integers")
    integers = tuple(n for n in map(Fraction, range(low, high + 1)) if _holds(region, n))
    return Region(integers, (False, *(True, False) * len(integers)))


def _from_conditions(text: str) -> NamedRegion:
    """Inequalities joined by `or`, `and`; a comma before `x \\ne` is an `and`, any other says too little."""
    alternatives = []
    for alternative in _OR.split(text):
        parts = [part for piece in _AND.split(alternative) for part in top_level(piece, ",") if part.strip()]
        if len(parts) > 1 and "," in alternative and not any("\\ne" in part for part in parts[1:]):
            raise NoRegionError("a comma between inequalities")
        alternatives.append([_condition(part) for part in parts])
    names = {name for conditions in alternatives for name, _ in conditions}
    if len(names) != 1 or not all(alternatives):
        raise NoRegionError(text)
    regions = [_combined([region for _, region in conditions], all) for conditions in alternatives]
    return NamedRegion(_combined(regions, any), names.pop())


def _condition(text: str) -> tuple[str, Region]:
    """One inequality, a chain of two, or `x \\in` a set."""
    member, equation = _MEMBER.fullmatch(text.strip()), _EQUATION.fullmatch(text.strip())
    if member is not None and not _SIGNS.search(text):
        return member["name"], _named(member["set"]).region
    if equation is not None and not _SIGNS.search(text):
        return equation["name"], _points(equation["point"])
    sides, signs = _sides(text)
    if len(sides) == 2:
        return _inequality(sides[0], signs[0], sides[1])
    if len(sides) != 3 or "!=" in signs or signs[0][0] != signs[1][0]:
        raise NoRegionError(text)
    name, low = _inequality(sides[1], _MIRRORED[signs[0]], sides[0])
    return name, _combined([low, _inequality(sides[1], signs[1], sides[2])[1]], all)


def _sides(text: str) -> tuple[list[str], list[str]]:
    """The sides of an inequality, or of a chain of them, and the signs between."""
    return [side.strip() for side in _SIGNS.split(text)], [_CANONICAL[sign] for sign in _SIGNS.findall(text)]


def _inequality(left: str, sign: str, right: str) -> tuple[str, Region]:
    below, at, above = "<" in sign or sign == "!=", "=" in sign and sign != "!=", ">" in sign or sign == "!="
    absolute = _ABSOLUTE.fullmatch(left)
    if absolute is not None and _NAME.fullmatch(absolute["inside"].strip()):
        bound = _point(right)
        if (isinstance(bound, Fraction) and bound <= 0) or not inexact(bound) > 0 or mp.isinf(inexact(bound)):
            raise NoRegionError("an absolute value below zero")
        return absolute["inside"].strip(), Region((-bound, bound), (above, at, below, at, above))
    if _NAME.fullmatch(left) is None:
        if _NAME.fullmatch(right) is None:
            raise NoRegionError(left)
        left, right = right, left
        below, above = above, below
    if left in ("e", "i"):
        raise NoRegionError(left)
    point = _point(right)
    if mp.isinf(inexact(point)):
        raise NoRegionError("an inequality with infinity")
    return left, Region((point,), (below, at, above))


def _set(text: str) -> Region:
    text = text.strip()
    if _REALS.fullmatch(text):
        return Region((), (True,))
    half = _HALF.fullmatch(text)
    if half is not None:
        return Region((Fraction(0),), (False, False, True) if "-" not in half[0] else (True, False, False))
    missing = _EXCEPT.fullmatch(text)
    if missing is not None:
        return _combined([Region((), (True,)), _points(missing["points"])], _in_the_first_alone)
    if text in ("\\varnothing", "\\emptyset", "\\{\\}"):
        return Region((), (False,))
    if text.startswith("\\{") and text.endswith("\\}"):
        return _points(text[2:-2])
    kind = brackets(text)
    ends = top_level(text[1:-1], ",") if kind else []
    if len(ends) == 1 and kind == "()":
        return _named(ends[0]).region
    if len(ends) != 2:
        raise NoRegionError(text)
    low, high = _point(ends[0]), _point(ends[1])
    if not inexact(low) < inexact(high):
        raise NoRegionError("ends out of order")
    if mp.isinf(inexact(low)):
        return Region((), (True,)) if mp.isinf(inexact(high)) else Region((high,), (True, kind[1] == "]", False))
    if mp.isinf(inexact(high)):
        return Region((low,), (False, kind[0] == "[", True))
    return Region((low, high), (False, kind[0] == "[", True, kind[1] == "]", False))


def _points(text: str) -> Region:
    return _combined(
        [Region((_point(part),), (False, True, False)) for part in top_level(_AND.sub(",", text), ",")], any
    )


def _point(text: str) -> Value:
    expression = read_or_none(text)
    found = None if expression is None else constant_value(expression)
    if found is None or (isinstance(found, mp.mpc) and abs(found.imag) > 0):
        raise NoRegionError(text)
    return found.real if isinstance(found, mp.mpc) else found


def _in_the_first_alone(inside: Sequence[bool]) -> bool:
    return inside[0] and not any(inside[1:])


def _combined(regions: Sequence[Region], decide: Callable[[Sequence[bool]], bool]) -> Region:
    """The set whose membership `decide` computes from that in each of `regions`, with only its own boundary points."""
    points: list[Value] = []
    for point in (point for region in regions for point in region.points):
        if not any(close(point, known) for known in points):
            points.append(point)
    points.sort(key=inexact)
    probes: list[Value] = [inexact(points[0]) - 1 if points else Fraction(0)]  # in each gap and each point, in order
    for index, point in enumerate(points):
        after = points[index + 1] if index + 1 < len(points) else None
        probes += [point, inexact(point) + 1 if after is None else (inexact(point) + inexact(after)) / 2]
    inside = [decide([_holds(region, probe) for region in regions]) for probe in probes]
    kept: list[Value] = []
    members = [inside[0]]
    for index, point in enumerate(points):
        at, beyond = inside[2 * index + 1], inside[2 * index + 2]
        if not members[-1] == at == beyond:
            kept.append(point)
            members += [at, beyond]
    return Region(tuple(kept), tuple(members))


def _holds(region: Region, probe: Value) -> bool:
    for index, point in enumerate(region.points):
        if close(point, probe):
            return region.inside[2 * index + 1]
    return region.inside[2 * bisect_left([inexact(point) for point in region.points], inexact(probe))]


class _Ends(NamedTuple):
    """One interval as text; no name where the text has none."""

    name: str
    kind: str
    low: str
    high: str


def _ends(text: str) -> _Ends | None:
    r"""The interval that a text writes as such, as `a < x \le b`, or as `x > a`."""
    if not _SIGNS.search(text):
        member = _MEMBER.fullmatch(text)
        inside = member["set"].strip() if member is not None else text
        kind = brackets(inside)
        ends = top_level(inside[1:-1], ",") if kind else []
        return _Ends(member["name"] if member is not None else "", kind, *ends) if len(ends) == 2 else None
    sides, signs = _sides(text)
    if len(sides) == 2:
        is_upper = signs[0][0] == ">"
        sides, signs = ["\\infty" if is_upper else "-\\infty", *sides], [">" if is_upper else "<", *signs]
    if len(sides) != 3 or _NAME.fullmatch(sides[1]) is None or sides[1] in ("e", "i"):
        return None
    if signs[0][0] == signs[1][0] == ">":
        sides, signs = sides[::-1], [_MIRRORED[sign] for sign in signs[::-1]]
    if not signs[0][0] == signs[1][0] == "<":
        return None
    kind = ("[" if signs[0] == "<=" else "(") + ("]" if signs[1] == "<=" else ")")
    return _Ends(sides[1], kind, sides[0], sides[2])

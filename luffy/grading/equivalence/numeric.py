"""Equality of expressions by their values, computed with 60 digits at fixed points.

Two expressions are equal if they agree at every point at which both have a value. Rational values are exact, so that
`10^{40} + 1` is not `10^{40}`; an expression that would take long (a sine of a tower of powers) has no value here.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from functools import partial
from typing import Any

from mpmath import mp, mpc, mpf

from luffy.grading.equivalence.expression import ANGULAR, DEGREE, Apply, Expression, Number, Variable, variables

DIGITS = 60
_TOLERANCE = 45
"""Number of digits in which equal values agree."""
_MIN_POINTS = 3
_ROUNDED = re.compile(r"-?[0-9]*\.([0-9]{2,6})")
_MAX_BITS = 20_000
"""Size of an exact power."""
_MAX_EXPONENT = 10**6
_MAX_ARGUMENT = 10**9
Value = Any
"""A Fraction, an mpf or an mpc."""
_REAL_POINTS = 6
_INTEGER_POINTS = (2, 3, 4, 5, 6, 7, 8, 9)
_I = repr(Variable("i"))
_STEPWISE = frozenset(("gcd", "lcm", "double factorial"))
"""Operations that are defined only on integers."""


class NoValueError(ArithmeticError):
    """The expression has no value at this point, or one that would take long."""


def value_of(expression: Expression, point: Mapping[str, Value] | None = None) -> Value:
    """The value of `expression` where its variables have the values of `point`; `NoValueError` without one."""
    with mp.workdps(DIGITS):
        value = _value(expression, point or {})
    if isinstance(value, Fraction) or not abs(value) < mpf(10) ** -_TOLERANCE:
        return value
    with mp.workdps(2 * DIGITS):  # where the rounding noise of a zero shrinks, as in `\cos\frac{\pi}{2}`, a value stays
        noise = abs(value) / 2 or mpf(10) ** -(DIGITS + _TOLERANCE)
        return value if abs(_value(expression, point or {})) > noise else Fraction(0)


def constant_value(expression: Expression) -> Value | None:
    """The value of an expression without variables; None for any other, or without a value."""
    if variables(expression):
        return None
    try:
        return value_of(expression)
    except NoValueError:
        return None


def same(left: Expression, right: Expression) -> bool:
    """Whether two expressions in the same variables are equal wherever both have a value: a real one, without `i`."""
    if left == right:
        return True
    names = variables(left)
    if names != variables(right):
        return False
    agreed = 0
    for values in _values(left, right, integers=_is_stepwise(left) or _is_stepwise(right)):
        if close(*values):
            agreed += 1
        elif not all(isinstance(value, mpc) and value.imag for value in values) or _I in repr((left, right)):
            return False
    return agreed >= (_MIN_POINTS if names else 1)


def proportional(left: Expression, right: Expression) -> bool:
    """Whether two expressions in the same variables differ by a constant factor: `left = 0` is `right = 0`."""
    names = variables(left)
    if not names or names != variables(right):
        return False
    ratios = []
    for one, other in _values(left, right, integers=False):
        if one == 0 or other == 0:
            return False
        with mp.workdps(DIGITS):
            ratios.append(_divide(one, other))
    return len(ratios) >= _MIN_POINTS and all(close(ratio, ratios[0]) for ratio in ratios)


def close(left: Value, right: Value) -> bool:
    """Whether two values are equal: exactly if they are rational, else in 45 digits."""
    if isinstance(left, Fraction) and isinstance(right, Fraction):
        return left == right
    with mp.workdps(DIGITS):
        one, other = inexact(left), inexact(right)
        if mp.isinf(one) or mp.isinf(other):
            return bool(one == other)
        size = max(abs(one), abs(other))
        if not mpf(10) ** -_TOLERANCE < size < mpf(10) ** _TOLERANCE:
            return False  # too large or small for digits to tell
        return bool(abs(one - other) <= size * mpf(10) ** -_TOLERANCE)


def distinct(left: Value, right: Value) -> bool:
    """Whether two values certainly differ: by far more than their last digits, unless they are rational."""
    if isinstance(left, Fraction) and isinstance(right, Fraction):
        return left != right
    with mp.workdps(DIGITS):
        one, other = inexact(left), inexact(right)
        return bool(abs(one - other) > max(abs(one), abs(other)) * mpf(10) ** -(DIGITS // 2))


def rounded_decimal(text: str) -> tuple[Fraction, int] | None:
    """The value and the number of decimals of a reference of three or more digits, which may have been rounded."""
    match = _ROUNDED.fullmatch(text)
    if match is None or len(text.strip("-0.").replace(".", "")) < 3:
        return None
    return Fraction(text), len(match[1])


def is_decimal(value: Fraction) -> bool:
    """Whether a number has finitely many decimals: such an answer is compared with a reference as it stands."""
    denominator = value.denominator
    for prime in (2, 5):
        while denominator % prime == 0:
            denominator //= prime
    return denominator == 1


def _values(left: Expression, right: Expression, *, integers: bool) -> Iterator[tuple[Value, Value]]:
    """The values of both at each point at which both have one.

    The points are positive and negative numbers of no special kind, or small integers; one without variables.
    """
    names = sorted(variables(left))
    places: list[dict[str, Value]] = [{} for _ in range(_REAL_POINTS if names else 1)]
    if integers and names:
        places = [{name: Fraction(start + 2 * index) for index, name in enumerate(names)} for start in _INTEGER_POINTS]
    for name in [] if integers else names:
        seed = sum((position + 1) * ord(character) for position, character in enumerate(name))
        for index, point in enumerate(places):
            size = Fraction(301 + (seed * 7919 + index * 104_729) % 2503, 1009)
            point[name] = -size if (seed + index) % 3 == 2 else size
    for point in places:
        try:
            values = value_of(left, point), value_of(right, point)
        except NoValueError:
            continue
        yield values


def _is_stepwise(expression: Expression) -> bool:
    if not isinstance(expression, Apply):
        return False
    return expression.operation in _STEPWISE or any(map(_is_stepwise, expression.arguments))


def _value(expression: Expression, point: Mapping[str, Value]) -> Value:
    if isinstance(expression, Number):
        return expression.value
    if isinstance(expression, Variable):
        name, constants = expression.name, {"\\pi": mp.pi, "e": mp.e, "i": mpc(0, 1), "\\infty": mp.inf}
        if name not in point and name not in constants:
            raise NoValueError(name)
        return point[name] if name in point else +constants[name]
    if expression.operation in ANGULAR:
        point = {**point, DEGREE: mp.pi / 180}
    arguments = [_value(argument, point) for argument in expression.arguments]
    try:
        return _OPERATIONS[expression.operation](*arguments)
    except (ValueError, OverflowError, ZeroDivisionError, TypeError, KeyError) as error:
        raise NoValueError(str(error)) from None


def inexact(value: Value) -> Value:
    """The value as an mpf or an mpc of the present precision."""
    return mpf(value.numerator) / value.denominator if isinstance(value, Fraction) else value


def _is_exact(*values: Value) -> bool:
    return all(isinstance(value, Fraction) for value in values)


def _divide(left: Value, right: Value) -> Value:
    if right == 0:
        raise NoValueError("a quotient by zero")
    return left / right if _is_exact(left, right) else inexact(left) / inexact(right)


def _power(base: Value, exponent: Value) -> Value:
    index = exponent.denominator if isinstance(exponent, Fraction) else 1
    if index > 1 and index % 2 and not isinstance(base, mpc) and base < 0:  # real, as the root of this index
        return _power(_root(base, Fraction(index)), Fraction(exponent.numerator))
    if _is_exact(base, exponent) and exponent.denominator == 1:
        bits = max(base.numerator.bit_length(), base.denominator.bit_length())
        if base == 0 and exponent < 0:
            raise NoValueError("a quotient by zero")
        if bits * abs(exponent) <= _MAX_BITS or (bits <= 1 and abs(exponent) < _MAX_EXPONENT):
            return Fraction(base) ** int(exponent)
    one, other = inexact(base), inexact(exponent)
    if one == 0:
        raise NoValueError("a power of zero")
    if abs(other) * abs(mp.log(one)) > _MAX_EXPONENT:
        raise NoValueError("a power too large")
    return mp.power(one, other)


def _root(radicand: Value, index: Value) -> Value:
    """The real root where there is one: `\\sqrt[3]{-2}` is `-\\sqrt[3]{2}`."""
    is_odd = isinstance(index, Fraction) and index.denominator == 1 and index % 2 == 1
    if is_odd and not isinstance(radicand, mpc) and radicand < 0:
        return -_root(-radicand, index)
    if _is_exact(radicand, index) and index == 2 and radicand >= 0:
        above, below = math.isqrt(radicand.numerator), math.isqrt(radicand.denominator)
        if above * above == radicand.numerator and below * below == radicand.denominator:
            return Fraction(above, below)
    if radicand == 0:
        return Fraction(0)
    return _power(radicand, _divide(Fraction(1), index))


def _factorial(value: Value) -> Value:
    if isinstance(value, mpc) or abs(value) > 5000:
        raise NoValueError("a factorial too large")
    if isinstance(value, Fraction) and value.denominator == 1 and value >= 0:
        return Fraction(math.factorial(int(value)))
    return mp.gamma(inexact(value) + 1)


def _binomial(above: Value, below: Value) -> Value:
    if isinstance(above, mpc) or isinstance(below, mpc) or abs(above) > 5000 or abs(below) > 5000:
        raise NoValueError("a binomial coefficient too large")
    if _is_exact(above, below) and above.denominator == below.denominator == 1 and above >= 0 and below >= 0:
        return Fraction(math.comb(int(above), int(below)))
    return mp.binomial(inexact(above), inexact(below))


def _of_integers(function: Callable[..., int], *values: Value) -> Value:
    for value in values:
        if not isinstance(value, Fraction) or value.denominator != 1 or not 0 <= value <= 5000:
            raise NoValueError("no integer")
    return Fraction(function(*map(int, values)))


def _rounded(exactly: Callable[[Fraction], int], function: Callable[[Value], Value], value: Value) -> Value:
    if isinstance(value, Fraction):
        return Fraction(exactly(value))
    if isinstance(value, mpc):
        raise NoValueError("a complex number is not rounded")
    return function(value)


def _analytic(function: Callable[[Value], Value], value: Value) -> Value:
    number = inexact(value)
    if not abs(number) < _MAX_ARGUMENT:
        raise NoValueError("an argument too large")
    return function(number)


def _logarithm(value: Value, base: Value | None = Fraction(10)) -> Value:
    """The natural one without a base."""
    if value == 0 or base in (0, 1):
        raise NoValueError("no logarithm")
    natural = mp.log(inexact(value))
    return natural if base is None else natural / mp.log(inexact(base))


_FUNCTIONS = {
    **{name: getattr(mp, name) for name in ANGULAR},
    "arcsin": mp.asin,
    "arccos": mp.acos,
    "arctan": mp.atan,
    "arccot": mp.acot,
    "sinh": mp.sinh,
    "cosh": mp.cosh,
    "tanh": mp.tanh,
    "exp": mp.exp,
}
_OPERATIONS: dict[str, Callable[..., Value]] = {
    "+": lambda *terms: sum(terms, Fraction(0)) if _is_exact(*terms) else mp.fsum(map(inexact, terms)),
    "-": lambda value: -value,
    "*": lambda left, right: left * right if _is_exact(left, right) else inexact(left) * inexact(right),
    "/": _divide,
    "^": _power,
    "root": _root,
    "abs": abs,
    "factorial": _factorial,
    "double factorial": partial(_of_integers, lambda number: math.prod(range(number, 0, -2))),
    "binomial": _binomial,
    "gcd": partial(_of_integers, math.gcd),
    "lcm": partial(_of_integers, math.lcm),
    "max": lambda *values: max(values, key=inexact),
    "min": lambda *values: min(values, key=inexact),
    "floor": partial(_rounded, math.floor, mp.floor),
    "ceiling": partial(_rounded, math.ceil, mp.ceil),
    "ln": lambda value: _logarithm(value, None),
    "log": _logarithm,
    "lg": _logarithm,
    **{name: partial(_analytic, function) for name, function in _FUNCTIONS.items()},
}

"""The built-in tool `calculator`: exact arithmetic within bounds."""

import ast
import operator
import re
from collections.abc import Callable
from decimal import Context, Decimal
from fractions import Fraction

_MAX_LENGTH = 1000
_MAX_DEPTH = 400
_MAX_BITS = 4096
"""Size of the numerator and of the denominator of every intermediate result: about 1200 digits."""
_MAX_DIGITS = 100
"""A longer whole number is rounded."""
_MAX_PLACES = 20
"""Most digits after the point with which an exact result is written."""
_ROUNDED_DIGITS = 12
_ROUNDED, _EXACT = Context(prec=_ROUNDED_DIGITS), Context(prec=_MAX_DIGITS + _MAX_PLACES)
_USE = "numbers, + - * / // % ** and parentheses"
_ALLOWED = re.compile(r"[0-9eE.+\-*/%() ]+")
_NUMBER = re.compile(r"(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]{1,3})?")
_SIGNS = str.maketrans({"×": "*", "÷": "/", "−": "-", "\n": " ", "\t": " "})


def calculator(expression: str) -> str:
    """Evaluate an arithmetic expression exactly.

    Args:
        expression: Numbers, + - * / // % ** and parentheses, for example (3 + 4.5) * 2.
    """
    text = expression.translate(_SIGNS).strip()
    if len(text) > _MAX_LENGTH:
        raise ValueError(f"an expression has at most {_MAX_LENGTH} characters")
    if not _ALLOWED.fullmatch(text):
        found = next((ascii(sign) for sign in text if not _ALLOWED.fullmatch(sign)), "an empty expression")
        raise ValueError(f"{found} is not allowed: use {_USE}")
    try:
        parsed = ast.parse(text, mode="eval").body
    except (SyntaxError, MemoryError, RecursionError):  # the parser's own answers to deep nesting
        raise ValueError(f"this is not an arithmetic expression: use {_USE}") from None
    return _written(_value(parsed, text, 0))


def _value(node: ast.expr, text: str, depth: int) -> Fraction:
    if depth > _MAX_DEPTH:
        raise ValueError(f"operations are nested more than {_MAX_DEPTH} deep")
    match node:
        case ast.Constant():
            written = text[node.col_offset : node.end_col_offset]
            if not _NUMBER.fullmatch(written):
                raise ValueError(f"{written} is not a decimal number")
            return _bounded(Fraction(written))
        case ast.UnaryOp(op=ast.USub()):
            return -_value(node.operand, text, depth + 1)
        case ast.UnaryOp(op=ast.UAdd()):
            return _value(node.operand, text, depth + 1)
        case ast.BinOp():
            left, right = _value(node.left, text, depth + 1), _value(node.right, text, depth + 1)
            if not right and isinstance(node.op, ast.Div | ast.FloorDiv | ast.Mod):
                raise ValueError("division by zero")
            return _bounded(Fraction(_OPERATIONS[type(node.op)](left, right)))
    raise ValueError(f"this is not an arithmetic expression: use {_USE}")


def _bounded(value: Fraction) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > _MAX_BITS:
        raise ValueError("a result is too large")
    return value


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1:
        raise ValueError("an exponent is a whole number")
    size = max(base.numerator.bit_length(), base.denominator.bit_length())
    if size > 1 and abs(exponent.numerator) * (size - 1) > _MAX_BITS:
        raise ValueError("a result is too large")
    if not base and exponent < 0:
        raise ValueError("division by zero")
    return Fraction(base**exponent.numerator)


_OPERATIONS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction | int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: _power,
}


def _written(value: Fraction) -> str:
    """The shortest decimal that equals `value`, or a rounded one that says so."""
    numerator, denominator = Decimal(value.numerator), Decimal(value.denominator)
    places = next((places for places in range(_MAX_PLACES + 1) if 10**places % value.denominator == 0), None)
    if places is not None and abs(value) < 10**_MAX_DIGITS:
        return f"{_EXACT.divide(numerator, denominator):.{places}f}"
    rounded = _ROUNDED.divide(numerator, denominator)
    exponent = rounded.adjusted()
    if -_ROUNDED_DIGITS - 1 <= exponent < _ROUNDED_DIGITS:
        text = f"{rounded:f}"
        shown = text.rstrip("0").rstrip(".") if "." in text else text
    else:
        shown = f"{rounded.scaleb(-exponent):.{_ROUNDED_DIGITS - 1}f}e{exponent}"
    return f"{shown} (rounded)"

r"""A recursive-descent parser of the LaTeX expressions that occur in competition answers.

It reads numbers, variables, the four operations, powers, roots, factorials, binomials, absolute values, rounding and
the named functions; a general grammar of LaTeX takes many times as long. Unknown and ambiguous notation (`1/2x`,
`\sin 2x/3`) raises `UnreadableError`: another parser decides then.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

MAX_DEPTH = 60
_TOKEN = re.compile(
    r"\s*(?:([0-9]*\.[0-9]*\\overline\{[0-9]+\}|[0-9]+\.[0-9]+|[0-9]+|\.[0-9]+)|(\\[A-Za-z]+|\\.)|([A-Za-z]+)|(.))",
    re.DOTALL,
)
ANGULAR = frozenset(("sin", "cos", "tan", "cot", "sec", "csc"))
"""Functions of an angle, in which a degree is a number."""
_OTHERS = ("arcsin", "arccos", "arctan", "arccot", "sinh", "cosh", "tanh", "ln", "log", "lg", "exp")
FUNCTIONS = ANGULAR | frozenset(_OTHERS)
_INVERSES = {"sin": "arcsin", "cos": "arccos", "tan": "arctan", "cot": "arccot"}
_LISTS = frozenset(("gcd", "lcm", "max", "min"))
_GREEK_NAMES = """
alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta iota kappa lambda mu nu xi rho sigma tau phi
varphi chi psi omega Gamma Delta Theta Lambda Xi Sigma Phi Psi Omega ell
"""
_GREEK = frozenset(_GREEK_NAMES.split())
_TIMES = frozenset(("*", "\\cdot", "\\times", "\\ast"))
_OVER = frozenset(("/", "\\div"))
_FRACTIONS = frozenset(("\\frac", "\\dfrac", "\\tfrac"))
_BINOMIALS = frozenset(("\\binom", "\\dbinom", "\\tbinom"))
_BRACKETS = {"(": ")", "[": "]", "{": "}", "\\lfloor": "\\rfloor", "\\lceil": "\\rceil", "|": "|", "\\lvert": "\\rvert"}
_INSIDE = {"\\lfloor": "floor", "\\lceil": "ceiling", "|": "abs", "\\lvert": "abs"}
_IDLE = frozenset(("\\left", "\\right", "\\,", "\\;", "\\!", "\\ ", "\\quad", "\\qquad", "\\big", "\\Big", "\\limits"))
_SHORT_WORDS = """
is or and the for all no yes not cm mm km kg odd day if as so to of in on it at by
"""
_WORDS = frozenset(_SHORT_WORDS.split())
"""Runs of two or three letters that are not a product of variables."""
DEGREE = "\u00b0"


class UnreadableError(ValueError):
    """The text is not an expression, or more than one."""


@dataclass(frozen=True, slots=True)
class Number:
    """An exact rational number."""

    value: Fraction


@dataclass(frozen=True, slots=True)
class Variable:
    """A variable, or a constant with a name (`\\pi`, `e`, `i`)."""

    name: str


@dataclass(frozen=True, slots=True)
class Apply:
    """An operation or function and its arguments."""

    operation: str
    arguments: "tuple[Expression, ...]"


Expression = Number | Variable | Apply
CONSTANTS = frozenset(("\\pi", "e", "i", "\\infty"))


@lru_cache(maxsize=4096)
def read(text: str) -> Expression:
    """Parse the whole of `text` as one expression; `UnreadableError` where it is not one."""
    reader = _Reader(_tokens(text))
    expression = reader.sum(0)
    if reader.peek():
        raise UnreadableError(reader.peek())
    return expression


def read_or_none(text: str) -> Expression | None:
    """Parse the whole of `text` as one expression; None where it is not one."""
    try:
        return read(text)
    except UnreadableError:
        return None


def variables(expression: Expression) -> frozenset[str]:
    """The names of the variables in `expression`."""
    if isinstance(expression, Variable):
        return frozenset() if expression.name in CONSTANTS else frozenset((expression.name,))
    if isinstance(expression, Apply):
        inside = frozenset().union(*map(variables, expression.arguments))
        return inside - {DEGREE} if expression.operation in ANGULAR else inside
    return frozenset()


def substituted(expression: Expression, values: Mapping[str, Expression]) -> Expression:
    """`expression` with `values` for the variables of these names, all at once."""
    if isinstance(expression, Variable):
        return values.get(expression.name, expression)
    if isinstance(expression, Apply):
        return Apply(expression.operation, tuple(substituted(argument, values) for argument in expression.arguments))
    return expression


def _tokens(text: str) -> list[str]:
    tokens: list[str] = []
    for number, command, letters, other in _TOKEN.findall(text.strip()):
        if command in _IDLE or other == "~":
            continue
        name = command[1:] if command else letters
        if name in FUNCTIONS or name in _LISTS:
            tokens.append(f"\\{name}")
        elif letters:
            # Side by side they are a product, unless they make a word or name points (`ABC`).
            is_named = len(letters) == 3 and letters.isupper()
            is_index = len(letters) > 1 and tokens[-1:] == ["_"]
            if len(letters) > 3 or is_named or letters.lower() in _WORDS or is_index:
                raise UnreadableError(letters)
            tokens += letters
        else:
            tokens.append(number or command or other)
    return [mark for mark in tokens if mark.strip()]


class _Reader:
    """The tokens and the current position of the parser."""

    def __init__(self, tokens: Sequence[str]) -> None:
        self._tokens, self._at = tokens, 0

    def peek(self) -> str:
        return self._tokens[self._at] if self._at < len(self._tokens) else ""

    def take(self, wanted: str = "") -> str:
        """Consume and return the next token, which has to be `wanted` if that is given."""
        mark = self.peek()
        if not mark or (wanted and mark != wanted):
            raise UnreadableError(f"{mark or 'the end'} instead of {wanted or 'an operand'}")
        self._at += 1
        return mark

    def sum(self, depth: int) -> Expression:
        if depth > MAX_DEPTH:
            raise UnreadableError("nested too deeply")
        parts = [self._product(depth)]
        while self.peek() in ("+", "-"):
            sign = self.take()
            part = self._product(depth)
            parts.append(part if sign == "+" else Apply("-", (part,)))
        return parts[0] if len(parts) == 1 else Apply("+", tuple(parts))

    def _product(self, depth: int) -> Expression:
        result, divided = self._signed(depth), False
        for _ in range(MAX_DEPTH):
            mark = self.peek()
            if mark in _TIMES:
                self.take()
                result, divided = Apply("*", (result, self._signed(depth))), False
            elif mark in _OVER:
                self.take()
                if divided:
                    raise UnreadableError("two fractions in a row")
                result, divided = Apply("/", (result, self._signed(depth))), True
            elif self._opens_factor(mark):
                if divided:
                    raise UnreadableError("a product below a slash")
                result = self._side_by_side(result, depth)
            else:
                return result
        raise UnreadableError("too many factors")

    def _side_by_side(self, left: Expression, depth: int) -> Expression:
        """`2x`, and the mixed number `2\\frac{3}{4}`."""
        mark, is_digit = self.peek(), self.peek()[0].isdigit()
        follows_integer = (
            isinstance(left, Number) and left.value.denominator == 1 and self._tokens[self._at - 1].isdigit()
        )
        right = self._factor(depth)
        if is_digit and follows_integer and self.peek() == "/" and isinstance(right, Number):
            self.take()
            right = Apply("/", (right, self._factor(depth)))
        elif is_digit:
            raise UnreadableError("two numbers side by side")
        if follows_integer and (is_digit or mark in _FRACTIONS):
            # The sum of an integer and a proper fraction; an improper one could as well be a factor.
            match right:
                case Apply("/", (Number(above), Number(below))) if 0 < above < below:
                    return Apply("+", (left, right))
                case Apply("/", (Number(), Number())):
                    raise UnreadableError("an improper fraction after a number")
        return Apply("*", (left, right))

    def _signed(self, depth: int) -> Expression:
        if self.peek() in ("+", "-"):
            sign = self.take()
            if depth > MAX_DEPTH:
                raise UnreadableError("nested too deeply")
            operand = self._signed(depth + 1)
            return operand if sign == "+" else Apply("-", (operand,))
        return self._factor(depth)

    def _opens_factor(self, mark: str) -> bool:
        if not mark or mark in ("|", "\\rvert", "\\rfloor", "\\rceil", ")", "]", "}"):
            return False
        is_command = mark in (*_FRACTIONS, *_BINOMIALS, "\\sqrt", "\\pi", "\\infty")
        is_named = mark[1:] in FUNCTIONS or mark[1:] in _LISTS or mark[1:] in _GREEK
        return mark[0].isalnum() or mark[0] == "." or mark in _BRACKETS or is_command or is_named

    def _factor(self, depth: int) -> Expression:
        """An operand with its factorials, degrees and power."""
        depth += 1
        base = self._primary(depth)
        for _ in range(MAX_DEPTH):
            if self.peek() not in ("!", "^"):
                break
            if self.take() == "!":
                double = self.peek() == "!"
                if double:
                    self.take()
                base = Apply("double factorial" if double else "factorial", (base,))
            elif self.peek() == "\\circ" or self._tokens[self._at : self._at + 3] == ["{", "\\circ", "}"]:
                self._at += 1 if self.peek() == "\\circ" else 3
                base = Apply("*", (base, Variable(DEGREE)))
            else:
                base = Apply("^", (base, self._argument(depth)))
                if self.peek() == "^":
                    raise UnreadableError("a power of a power")
        return base

    def _argument(self, depth: int) -> Expression:
        """What follows `\\frac`, `^` or `\\sqrt`: a group in braces, or one digit or letter."""
        mark = self.peek()
        if mark == "{":
            return self._group(depth)
        if mark == "-":
            self.take()
            return Apply("-", (self._argument(depth + 1),))
        if mark.isdigit() and len(mark) > 1:
            raise UnreadableError("digits without braces")
        return self._primary(depth + 1)

    def _group(self, depth: int) -> Expression:
        opening = self.take()
        inside = self.sum(depth + 1)
        self.take(_BRACKETS[opening])
        return Apply(_INSIDE[opening], (inside,)) if opening in _INSIDE else inside

    def _primary(self, depth: int) -> Expression:
        mark = self.peek()
        if mark in _BRACKETS:
            return self._group(depth)
        self.take(mark)
        if mark[:1].isdigit() or (mark[:1] == "." and len(mark) > 1):
            if self.peek() == "_":
                raise UnreadableError("a numeral with its base")
            return Number(_value(mark))
        name = mark[1:]
        if mark in _FRACTIONS:
            digits = self.peek()
            if digits.isdigit() and len(digits) == 2:  # \frac12
                self.take()
                return Apply("/", (Number(Fraction(digits[0])), Number(Fraction(digits[1]))))
            if digits.isdigit() and len(digits) > 2:
                raise UnreadableError("digits without braces")
            return Apply("/", (self._argument(depth), self._argument(depth)))
        if mark in _BINOMIALS:
            return Apply("binomial", (self._argument(depth), self._argument(depth)))
        if mark == "\\sqrt":
            index: Expression = Number(Fraction(2))
            if self.peek() == "[":
                self.take()
                index = self.sum(depth + 1)
                self.take("]")
            if self.peek() in ("(", "["):
                raise UnreadableError("a root of a bracket")
            return Apply("root", (self._argument(depth), index))
        if name in FUNCTIONS:
            return self._function(name, depth)
        if name in _LISTS:
            closing = {"(": ")", "{": "}", "\\{": "\\}"}.get(self.take())
            if closing is None:
                raise UnreadableError("a list without brackets")
            parts = [self.sum(depth + 1)]
            while self.peek() == ",":
                self.take()
                parts.append(self.sum(depth + 1))
            self.take(closing)
            return Apply(name, tuple(parts))
        if mark in ("\\pi", "\\infty") or (len(mark) == 1 and mark.isalpha()) or name in _GREEK:
            return self._variable(mark, depth)
        raise UnreadableError(mark)

    def _variable(self, name: str, depth: int) -> Expression:
        if self.peek() == "_":
            self.take("_")
            if self.peek() == "{":
                self.take()
                index = ""
                while self.peek() != "}":
                    index += self.take()
                self.take()
            else:
                index = self.take()
            name += f"_{{{index}}}"
            if name[0] == "C" and self.peek() == "^":
                self.take()
                return Apply("binomial", (read(name[2:].strip("{}")), self._argument(depth)))
        if self.peek() == "'" or (name in ("f", "g", "h") and self.peek() == "("):
            raise UnreadableError("a function without its definition")
        return Variable(name)

    def _function(self, name: str, depth: int) -> Expression:
        base: Expression | None = None
        power: Expression | None = None
        if name == "log" and self.peek() == "_":
            self.take()
            if self.peek().isdigit() and len(self.peek()) > 1:
                # `\log_28` is the logarithm to base 2 of 8, which most writers mean otherwise.
                raise UnreadableError("digits without braces")
            base = self._argument(depth)
        if self.peek() == "^":
            self.take()
            power = self._argument(depth)
        if power == Apply("-", (Number(Fraction(1)),)):
            if name not in _INVERSES:
                raise UnreadableError("which inverse")
            name, power = _INVERSES[name], None
        if self.peek() in ("(", "{", "["):
            argument = self._primary(depth + 1)
            if self.peek() in ("^", "!"):
                raise UnreadableError("a power after a function's argument")
        else:
            argument = self._factor(depth)
            while (mark := self.peek()) and self._opens_factor(mark) and mark[1:] not in FUNCTIONS:
                if mark in ("(", "["):
                    raise UnreadableError("a bracket after a function's argument")
                argument = self._side_by_side(argument, depth)
            if self.peek() in _OVER:
                raise UnreadableError("a slash after a function's argument")
        value = Apply("log", (argument, base)) if base is not None else Apply(name, (argument,))
        return value if power is None else Apply("^", (value, power))


def _value(mark: str) -> Fraction:
    """The value of a decimal, which may repeat."""
    if "\\overline" not in mark:
        return Fraction(mark)
    digits, _, period = mark.partition("\\overline")
    period = period.strip("{}")
    decimals = len(digits.partition(".")[2])
    start = Fraction(digits.rstrip(".") or "0")
    return start + Fraction(int(period), (10 ** len(period) - 1) * 10**decimals)

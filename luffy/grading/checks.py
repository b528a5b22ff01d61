"""Checks that run in a worker process, since each may run forever, exhaust its memory or crash."""

from collections.abc import Callable

from sympy.core.cache import clear_cache
from sympy.core.facts import InconsistentAssumptions
from sympy.core.random import seed

from luffy.grading.custom_functions import Verdict, call
from luffy.grading.equivalence.alike import conflicting
from luffy.grading.equivalence.math_strict import strictly_equal
from luffy.grading.equivalence.verify import verify_answer
from luffy.types import Outcome

_ORDERS = 4
"""Random orders of sympy's deductions that are tried before the last one, whose contradiction is a crash."""
MATH, STRICT, CUSTOM = "math", "math_strict", "custom"
_REASONS = {
    Outcome.CORRECT: "equal by math-verify",
    Outcome.WRONG: "different by math-verify",
    Outcome.UNPARSABLE: "math-verify reads no formula",
}


def run_check(check: str, answer: str, gold: str, context: str) -> Verdict:
    """Return (outcome, reason, the check's own reward); an exception that the check raises is a crash.

    sympy makes its deductions about an expression in random order and contradicts itself in some orders, such as 1 in
    30 for "2" and "0" on two lines. The order is seeded, so a verdict is the same every time.
    """
    for attempt in range(_ORDERS):
        seed(attempt)
        try:
            return CHECKS[check](answer, gold, context)
        except InconsistentAssumptions:
            clear_cache()  # deductions of the order that failed
    seed(_ORDERS)
    return CHECKS[check](answer, gold, context)


def warm_up() -> None:
    """Parse a few formulas: the first use of a grammar may take longer than a short time limit."""
    seed(0)
    for answer, gold in (
        (r"\frac{1}{2}+\sqrt{x}", r"0.5+x^{1/2}"),
        (r"\left[0,\infty\right)", r"\{1,2\}"),
        (r"(1,\pi)", r"x \le 2"),
    ):
        verify_answer(answer, gold)
        strictly_equal(answer, gold)


def _math(answer: str, gold: str, context: str) -> Verdict:
    outcome = verify_answer(answer, gold)
    return outcome, _REASONS[outcome], None


def _strict(answer: str, gold: str, context: str) -> Verdict:
    outcome, reason = strictly_equal(answer, gold)
    if outcome is Outcome.CORRECT and conflicting(answer, gold):
        return Outcome.WRONG, "other names, units or words", None
    return outcome, reason, None


def _custom(answer: str, gold: str, context: str) -> Verdict:
    path, _, rest = context.partition("\n")
    return call(path, answer, gold, rest)


CHECKS: dict[str, Callable[[str, str, str], Verdict]] = {MATH: _math, STRICT: _strict, CUSTOM: _custom}

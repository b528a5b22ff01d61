"""sympy's deductions run in a random order, some of which contradict themselves: no verdict hangs on the order."""

import random

import pytest
from sympy.core.facts import InconsistentAssumptions
from sympy.core.random import rng, seed

from luffy.grading.checks import CHECKS, run_check
from luffy.types import Outcome


def contradict(times: int):
    """A check that contradicts itself so many times, and then tells what sympy draws."""
    left = [times]

    def check(answer: str, gold: str, context: str):
        left[0] -= 1
        if left[0] >= 0:
            raise InconsistentAssumptions({}, "even", True)
        return Outcome.WRONG, str(rng.random()), None

    return check


def test_a_contradiction_is_deduced_again_in_another_order(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = []
    for times in (0, 0, 2):
        seed(random.randrange(1 << 30))  # whatever was graded before
        monkeypatch.setitem(CHECKS, "math", contradict(times))
        outcome, reason, _ = run_check("math", "2\n0", "47", "")
        assert outcome is Outcome.WRONG
        drawn.append(reason)
    assert drawn[0] == drawn[1] != drawn[2]


def test_one_that_stays_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CHECKS, "math", contradict(100))
    with pytest.raises(InconsistentAssumptions):
        run_check("math", "2\n0", "47", "")

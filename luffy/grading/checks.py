"""Checks that run in a worker process, since each may run forever, exhaust its memory or crash.

The user's grading functions are called by name. Two signatures are understood: verl's `(data_source, solution_str,
ground_truth, extra_info=None)` and verifiers' keywords (any of `completion, answer, prompt, info, task`). What cannot
work here is refused when it is loaded: functions of verifiers that need its `parser` or the `state` of its environment.
"""

import asyncio
import functools
import inspect
import json
import math
import sys
from collections.abc import Awaitable, Callable, Mapping
from numbers import Real
from typing import TYPE_CHECKING, Any

from sympy.core.cache import clear_cache
from sympy.core.facts import InconsistentAssumptions
from sympy.core.random import seed

from luffy.grading.equivalence.alike import conflicting
from luffy.grading.equivalence.certain import by_label
from luffy.grading.equivalence.math_strict import strictly_equal
from luffy.grading.equivalence.text import without_upright_units
from luffy.grading.equivalence.verify import verify_answer, with_primes
from luffy.import_paths import NotImported, imported
from luffy.types import Outcome

if TYPE_CHECKING:
    from reasoning_gym.dataset import ProceduralDataset

Function = Callable[..., object]
Verdict = tuple[Outcome, str, float | None]
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
    outcome = verify_answer(*by_label(answer, gold))
    return outcome, _REASONS[outcome], None


def _strict(answer: str, gold: str, context: str) -> Verdict:
    pair = without_upright_units(*by_label(answer, gold))
    pair = pair and with_primes(*pair)
    outcome, reason = (Outcome.WRONG, "") if pair is None else strictly_equal(*pair)
    if pair is None or (outcome is Outcome.CORRECT and conflicting(*pair)):
        return Outcome.WRONG, "other names, units or words", None
    return outcome, reason, None


class UnusableFunction(Exception):
    """The import path does not lead to a function that can be called as a grader."""


def _custom(response: str, gold: str, context: str) -> Verdict:
    """Call the function that `context` names; UnusableFunction where its path is wrong.

    `context`: the path, and on the next line JSON text with `data_source`, `question`, `extra_info`, `completion`
    (messages or text) and `correct_from`.
    """
    path, _, rest = context.partition("\n")
    function, mark = loaded(path)
    known = json.loads(rest)
    question, source, info = known["question"], known["data_source"], known["extra_info"]
    arguments = {"data_source": source, "solution_str": response, "ground_truth": gold, "extra_info": info}
    if mark == "completion":
        arguments = {"completion": response, "prompt": question, "answer": gold, "info": info, "task": source}
        if known["completion"] == "messages":
            arguments["completion"] = [{"role": "assistant", "content": response}]
            arguments["prompt"] = [{"role": "user", "content": question}]
    named = inspect.signature(function).parameters
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in named.values()):
        arguments = {name: value for name, value in arguments.items() if name in named}
    try:
        result = function(**arguments)
        if inspect.isawaitable(result):

            async def awaited(result: Awaitable[object] = result) -> object:
                return await result

            result = asyncio.run(awaited())
    except Exception as error:  # noqa: BLE001 - an exception of the function fails this answer, not the pool
        return Outcome.CRASHED, f"{path} raised {type(error).__name__}: {str(error)[:200]}", math.nan
    score = result.get("score") if isinstance(result, Mapping) else result
    # Where a result is numpy's, numpy is loaded; its truth values are no numbers to `numbers`.
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(score, numpy.generic):
        score = score.item()
    if not isinstance(score, Real) or not math.isfinite(score):
        return Outcome.CRASHED, f"{path} returned {repr(result)[:80]}, which is no finite number", math.nan
    score = float(score)
    right = score >= known["correct_from"]
    return Outcome.CORRECT if right else Outcome.WRONG, f"{path} gave {score:g}", score


def reasoning_gym_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Mapping[str, Any]) -> float:
    """The score of the package reasoning-gym for an answer to the entry in `extra_info`, between 0 and 1."""
    from luffy.config.grading import GYM_ENTRY  # which other workers do without, as without the package

    known = extra_info[GYM_ENTRY]
    dataset = _gym_dataset(known["task"], json.dumps(known["options"]))
    return float(dataset.score_answer(solution_str, known["entry"]))


@functools.lru_cache(maxsize=64)
def _gym_dataset(task: str, options: str) -> "ProceduralDataset":
    import reasoning_gym

    return reasoning_gym.create_dataset(task, size=1, seed=0, **json.loads(options))


CHECKS: dict[str, Callable[[str, str, str], Verdict]] = {MATH: _math, STRICT: _strict, CUSTOM: _custom}


@functools.cache
def loaded(path: str) -> tuple[Function, str]:
    """The function, and the parameter that tells its signature; a call in advance keeps its import out of a limit."""
    try:
        function = imported(path)
    except NotImported as error:
        raise UnusableFunction(str(error)) from error.__cause__
    if not callable(function):
        raise UnusableFunction(f"{path} is not a function")
    try:
        named = inspect.signature(function).parameters
    except ValueError:
        raise UnusableFunction(f"{path} does not tell its parameters; call it in a function of your own") from None
    mark = next((parameter for parameter in _PROVIDED if parameter in named), None)
    if mark is None:
        raise UnusableFunction(
            f"{path} takes ({', '.join(named)}); a grader takes (data_source, solution_str, ground_truth, "
            "extra_info=None) or keywords with `completion`"
        )
    for parameter in named.values():
        if parameter.kind is parameter.POSITIONAL_ONLY:
            raise UnusableFunction(f"{path} takes `{parameter.name}` by position alone; a grader is called by keywords")
        name, is_variadic = parameter.name, parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
        if parameter.default is not parameter.empty or is_variadic or name in _PROVIDED[mark]:
            continue
        why = f", which no grader is given: there are {', '.join(_PROVIDED[mark])}; give it a default"
        if name in _VERIFIERS_ONLY:
            why = f", {_VERIFIERS_ONLY[name]}; take what it needs from `completion`, or give `{name}` a default"
        raise UnusableFunction(f"{path} needs `{name}`{why}")
    return function, mark


_PROVIDED = {
    "solution_str": ("data_source", "solution_str", "ground_truth", "extra_info"),
    "completion": ("completion", "prompt", "answer", "info", "task"),
}
"""The arguments of each signature, verl's and verifiers', by the parameter that tells it."""
_VERIFIERS_ONLY = {
    "parser": "which belongs to a rubric of verifiers, and there is none here",
    "state": "which an environment of verifiers fills, and there is none here",
}

"""Grading functions of the user's, called by name in a worker process.

Two signatures are understood: verl's `(data_source, solution_str, ground_truth, extra_info=None)` and verifiers'
keywords (any of `completion, answer, prompt, info, task, parser, state`).
"""

import functools
import importlib
import inspect
import json
import math
import os
import sys
from collections.abc import Callable, Mapping
from numbers import Real

from luffy.types import Outcome

Function = Callable[..., object]
Verdict = tuple[Outcome, str, float | None]


class NoSuchFunction(Exception):
    """The import path leads nowhere, or to something that cannot be called as a grader."""


def preload(path: str) -> None:
    """Import a function's module ahead of its first use, so that no time limit counts the import."""
    _function(path)


def call(path: str, response: str, gold: str, context: str) -> Verdict:
    """Return (outcome, reason, score); NoSuchFunction where the path is wrong.

    `context`: JSON text with `data_source`, `question`, `extra_info`, `completion` (messages or text) and
    `correct_from`.
    """
    function, style = _function(path)
    known = json.loads(context)
    arguments = _STYLES[style](response, gold, known)
    try:
        result = function(**_accepted(function, arguments))
    except Exception as error:  # noqa: BLE001 - whatever it raises is its answer's fate, never the pool's
        return Outcome.CRASHED, f"{path} raised {type(error).__name__}: {str(error)[:200]}", 0.0
    score = _score(result)
    if score is None:
        return Outcome.CRASHED, f"{path} returned {repr(result)[:80]}, which is no finite number", 0.0
    right = score >= known["correct_from"]
    return Outcome.CORRECT if right else Outcome.WRONG, f"{path} gave {score:g}", score


@functools.cache
def _function(path: str) -> tuple[Function, str]:
    module_name, _, name = path.partition(":")
    # Last, so that nothing in the working directory takes the place of an installed package.
    if (here := os.getcwd()) not in sys.path:  # noqa: PTH109 - `sys.path` holds text
        sys.path.append(here)
    try:
        function = getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError) as error:
        raise NoSuchFunction(f"{path} cannot be imported: {error}") from None
    except Exception as error:
        raise NoSuchFunction(f"{module_name} fails on import: {type(error).__name__}: {error}") from error
    return function, _style(path, function)


def _style(path: str, function: Function) -> str:
    if not callable(function):
        raise NoSuchFunction(f"{path} is no function")
    if inspect.iscoroutinefunction(function):
        raise NoSuchFunction(f"{path} is asynchronous; give a plain function")
    named = inspect.signature(function).parameters
    for style, parameter in (("verl", "solution_str"), ("verifiers", "completion")):
        if parameter in named:
            return style
    raise NoSuchFunction(
        f"{path} takes ({', '.join(named)}); a grader takes (data_source, solution_str, ground_truth, "
        "extra_info=None) or keywords with `completion`"
    )


def _verl(response: str, gold: str, known: Mapping[str, object]) -> dict[str, object]:
    return {
        "data_source": known["data_source"],
        "solution_str": response,
        "ground_truth": gold,
        "extra_info": known["extra_info"],
    }


def _verifiers(response: str, gold: str, known: Mapping[str, object]) -> dict[str, object]:
    as_messages = known["completion"] == "messages"
    question = known["question"]
    return {
        "completion": [{"role": "assistant", "content": response}] if as_messages else response,
        "prompt": [{"role": "user", "content": question}] if as_messages else question,
        "answer": gold,
        "info": known["extra_info"],
        "task": known["data_source"],
        "parser": None,
        "state": {},
    }


_STYLES: dict[str, Callable[[str, str, Mapping[str, object]], dict[str, object]]] = {
    "verl": _verl,
    "verifiers": _verifiers,
}


def _accepted(function: Function, arguments: Mapping[str, object]) -> Mapping[str, object]:
    named = inspect.signature(function).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in named.values()):
        return arguments
    return {name: value for name, value in arguments.items() if name in named}


def _score(result: object) -> float | None:
    if isinstance(result, Mapping):
        result = result.get("score")
    if not isinstance(result, Real):
        return None
    return float(result) if math.isfinite(result) else None

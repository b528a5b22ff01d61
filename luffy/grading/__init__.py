"""Answer extraction, kinds of graders, and the pool of killable workers."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from luffy.grading.extract import extract_answer
    from luffy.grading.pool import JUDGE_CACHE, GraderPool
    from luffy.grading.request import Grade, Grader, GradeRequest, Problem, problem_of, require_verdicts

__all__ = [
    "JUDGE_CACHE",
    "Grade",
    "GradeRequest",
    "Grader",
    "GraderPool",
    "Problem",
    "extract_answer",
    "problem_of",
    "require_verdicts",
]
_MODULES = {"extract_answer": "extract", "JUDGE_CACHE": "pool", "GraderPool": "pool"}


def __getattr__(name: str) -> object:
    """Import what is asked for: the worker's process imports this package, and needs neither the pool nor HTTP."""
    if name not in __all__:
        raise AttributeError(f"module 'luffy.grading' has no attribute {name!r}")
    return getattr(import_module(f"luffy.grading.{_MODULES.get(name, 'request')}"), name)

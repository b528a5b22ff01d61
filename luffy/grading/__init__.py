"""Answer extraction, kinds of graders, and the pool of killable workers."""

from luffy.grading.extract import extract_answer
from luffy.grading.judge import is_unjudged
from luffy.grading.pool import JUDGE_CACHE, GraderPool
from luffy.grading.request import Grade, Grader, GradeRequest, Problem, problem_of

__all__ = [
    "JUDGE_CACHE",
    "Grade",
    "GradeRequest",
    "Grader",
    "GraderPool",
    "Problem",
    "extract_answer",
    "is_unjudged",
    "problem_of",
]

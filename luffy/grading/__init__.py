"""Answer extraction, verification, and the pool of killable workers."""

from luffy.grading.extract import extract_answer
from luffy.grading.pool import Grade, GradeRequest, GraderPool

__all__ = ["Grade", "GradeRequest", "GraderPool", "extract_answer"]

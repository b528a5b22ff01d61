"""Grades of responses, with a second grade on mathematics: the other of the two math graders judges them, too."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from luffy.config.grading import GraderKind, MathGrader, StrictMathGrader
from luffy.evaluation.sample_files import SampleRecord
from luffy.grading.pool import GraderPool
from luffy.grading.request import Grade, GradeRequest
from luffy.types import Outcome

_OTHER: dict[str, GraderKind] = {"math": StrictMathGrader(), "math_strict": MathGrader()}


@dataclass(frozen=True, slots=True)
class ResponseGrades:
    """The grades of one response."""

    grader: str
    """Kind of the grader whose grade counts."""
    grade: Grade
    second: Grade | None
    """By the other math grader; None where the first is no math grader."""

    @property
    def second_grader(self) -> str | None:
        return None if self.second is None else _OTHER[self.grader].kind

    def added_to(self, record: SampleRecord) -> SampleRecord:
        """`record` with these grades instead of its own."""
        return replace(
            record,
            answer=self.grade.extracted,
            outcome=self.grade.outcome.value,
            reason=self.grade.reason,
            correct=self.grade.outcome is Outcome.CORRECT,
            grader=self.grader,
            second_grader=self.second_grader,
            second_outcome=None if self.second is None else self.second.outcome.value,
        )


def grade_responses(
    grader: GraderPool, requests: Sequence[GradeRequest], *, second: bool = True
) -> list[ResponseGrades]:
    """The grades of each response, with second grades on mathematics unless `second` is false.

    Raises what the pool raises.
    """
    kinds = [grader.kind_of(request).kind for request in requests]
    twice = [i for i, kind in enumerate(kinds) if second and kind in _OTHER]
    repeats = [replace(requests[i], kind=_OTHER[kinds[i]]) for i in twice]
    # In one call, so that the workers never wait between first and second grades.
    grades = grader.grade([*requests, *repeats])
    second_grades = dict(zip(twice, grades[len(requests) :], strict=True))
    return [ResponseGrades(kind, grades[i], second_grades.get(i)) for i, kind in enumerate(kinds)]

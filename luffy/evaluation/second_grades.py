"""Verdicts on responses, with a second opinion where there is one: on mathematics, by the other of two graders."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from luffy.config.grading import GraderKind, MathGrader, StrictMathGrader
from luffy.evaluation.sample_records import SampleRecord
from luffy.grading import Grade, GradeRequest, GraderPool
from luffy.types import Outcome

_OTHER: dict[str, GraderKind] = {"math": StrictMathGrader(), "math_strict": MathGrader()}


@dataclass(frozen=True, slots=True)
class Opinions:
    """What became of one response."""

    grader: str
    """Kind of the grader whose verdict counts."""
    grade: Grade
    second: Grade | None
    """Of the other grader of mathematics; None where the first is of another kind."""

    @property
    def second_grader(self) -> str | None:
        return None if self.second is None else _OTHER[self.grader].kind

    def entered(self, record: SampleRecord) -> SampleRecord:
        """`record` with these verdicts in place of its own."""
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


def opinions(grader: GraderPool, requests: Sequence[GradeRequest], *, second: bool = True) -> list[Opinions]:
    """Return what `grader` and, on mathematics, the other grader say of each response. Raises what the pool raises.

    Without `second` no other grader is asked.
    """
    kinds = [grader.kind_of(request).kind for request in requests]
    twice = [i for i, kind in enumerate(kinds) if second and kind in _OTHER]
    others = [replace(requests[i], kind=_OTHER[kinds[i]]) for i in twice]
    # Both at once: the workers have no pause between them.
    grades = grader.grade([*requests, *others])
    others_said = dict(zip(twice, grades[len(requests) :], strict=True))
    return [Opinions(kind, grades[i], others_said.get(i)) for i, kind in enumerate(kinds)]

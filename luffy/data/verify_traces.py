"""Whether demonstrations end in the right answer, and whether an environment still answers them as recorded."""

from collections.abc import Sequence
from dataclasses import replace
from enum import StrEnum
from typing import Protocol

from luffy.grading import GradeRequest, GraderPool, problem_of, require_verdicts
from luffy.types import Outcome, Prompt, Trace


class Replayed(StrEnum):
    """Result of playing a trace of many turns again."""

    SAME = "same"
    """The environment answered every turn as recorded."""
    DIFFERS = "differs"
    CRASHED = "crashed"
    """The environment failed."""


class TraceReplayer(Protocol):
    """Plays recorded turns in an environment. It may be sent to another process."""

    def replay(self, prompts: Sequence[Prompt]) -> list[list[Replayed | None]]:
        """The result for each trace of each prompt; None for a single-turn trace, which has no answers to compare."""
        ...


def grade_traces(prompts: Sequence[Prompt], grader: GraderPool) -> list[list[Outcome]]:
    """Return what grading found for each trace of each prompt.

    Raises LostError if a judge could not be reached: that is not a verdict on the traces.
    """
    requests = [
        GradeRequest(trace.reply, prompt.ground_truth, problem_of(prompt))
        for prompt in prompts
        for trace in prompt.traces
    ]
    grades = grader.grade(requests)
    require_verdicts(grades, "traces", "finished shards are kept, and the same command continues after them")
    outcomes = iter([grade.outcome for grade in grades])
    return [[next(outcomes) for _ in prompt.traces] for prompt in prompts]


def with_verdict(trace: Trace, outcome: Outcome) -> Trace:
    """Return the trace with `verified` set; a verdict that its source brought along is replaced."""
    return replace(trace, verified=outcome is Outcome.CORRECT)

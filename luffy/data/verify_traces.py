"""Whether demonstrations end in the right answer: graded, never assumed."""

from collections.abc import Sequence

from luffy.grading import GradeRequest, GraderPool, problem_of
from luffy.types import Outcome, Prompt, Trace


def grade_traces(prompts: Sequence[Prompt], grader: GraderPool) -> list[list[Outcome]]:
    """Return what grading found for each trace of each prompt."""
    requests = [
        GradeRequest(trace.reply, prompt.ground_truth, problem_of(prompt))
        for prompt in prompts
        for trace in prompt.traces
    ]
    outcomes = iter([grade.outcome for grade in grader.grade(requests)])
    return [[next(outcomes) for _ in prompt.traces] for prompt in prompts]


def with_verdict(trace: Trace, outcome: Outcome) -> Trace:
    """Return the trace with `verified` set; a verdict that its source brought along is replaced."""
    # `dataclasses.replace` would take most of the time of a large corpus.
    return Trace(
        trace.text,
        trace.author,
        outcome is Outcome.CORRECT,
        trace.logprobs,
        trace.turns,
        trace.model,
        trace.decoding,
        trace.num_tokens,
    )

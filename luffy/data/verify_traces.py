"""Whether demonstrations end in the right answer: graded, never assumed."""

import dataclasses
from collections import Counter
from collections.abc import Sequence

from luffy.grading import GradeRequest, GraderPool, problem_of
from luffy.types import Outcome, Prompt, Trace


def verify_traces(prompts: Sequence[Prompt], grader: GraderPool) -> tuple[list[Prompt], Counter[Outcome]]:
    """Return the prompts with `verified` set on each trace, and how often each outcome was found.

    A verdict that a source brings along is replaced.
    """
    requests = [
        GradeRequest(trace.text, prompt.ground_truth, problem_of(prompt))
        for prompt in prompts
        for trace in prompt.traces
    ]
    outcomes = [grade.outcome for grade in grader.grade(requests)]
    remaining = iter(outcomes)
    graded = [
        dataclasses.replace(prompt, traces=tuple([_marked(trace, next(remaining)) for trace in prompt.traces]))
        for prompt in prompts
    ]
    return graded, Counter(outcomes)


def _marked(trace: Trace, outcome: Outcome) -> Trace:
    # `dataclasses.replace` would take most of the time of a large corpus.
    return Trace(trace.text, trace.author, outcome is Outcome.CORRECT, trace.logprobs)

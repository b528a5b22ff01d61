"""Each kind of grader as a list of steps, and the combination of their grades into one.

`steps` lists the steps of a request under a kind: grades that are already settled, checks for a worker process,
questions for a judge. `conclude` takes the grades of these steps, in the same order, and combines them.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from luffy.config.grading import (
    GYM_ENTRY,
    AnyGrader,
    BothGrader,
    CustomGrader,
    GraderKind,
    JudgeGrader,
    MathGrader,
    MeasureGrader,
    ReasoningGymGrader,
    StrictMathGrader,
    WeightedGrader,
)
from luffy.grading.choice import grade_choice
from luffy.grading.exact import grade_exact
from luffy.grading.extract import answer_tag, boxed_answer, final_reply, own_reply, plain_answer
from luffy.grading.refusals import refusal
from luffy.grading.request import Grade, GradeRequest, JudgeRequest, Judging, Verification
from luffy.grading.response_format import grade_format
from luffy.grading.shortcuts import settle
from luffy.types import Outcome

Step = Grade | Verification | Judging
_OPEN = Grade(Outcome.NO_ANSWER, None, "the reasoning is not closed")
_FAILED = Grade(Outcome.CRASHED, None, "the environment failed")
_SCORED_BY_GYM = "luffy.grading.reasoning_gym_score:score"
_NO_BOX = Grade(Outcome.NO_ANSWER, None, "no box, or an empty one")


def steps(kind: GraderKind, request: GradeRequest) -> list[Step]:
    """The steps that grade `request` under `kind`."""
    if isinstance(kind, AnyGrader | BothGrader):
        return [step for part in kind.of for step in steps(part, request)]
    if isinstance(kind, WeightedGrader):
        return [step for part in kind.parts for step in steps(part.grader, request)]
    return [_FAILED if request.has_failed else _LEAVES[kind.kind](kind, request)]


def conclude(kind: GraderKind, found: Iterator[Grade]) -> Grade:
    """The grade under `kind`, from those of its steps."""
    if isinstance(kind, AnyGrader):
        return _any(kind, [conclude(part, found) for part in kind.of])
    if isinstance(kind, BothGrader):
        return _both(kind, [conclude(part, found) for part in kind.of])
    if isinstance(kind, WeightedGrader):
        return _weighted(kind, [conclude(part.grader, found) for part in kind.parts])
    return next(found)


def functions_of(kind: GraderKind) -> list[str]:
    """The import paths of all functions in `kind` that workers import: the user's, and that of reasoning-gym."""
    own = [leaf.function for leaf in leaves(kind) if isinstance(leaf, CustomGrader)]
    return own + [_SCORED_BY_GYM for leaf in leaves(kind) if isinstance(leaf, ReasoningGymGrader)]


def leaves(kind: GraderKind) -> list[GraderKind]:
    """The elementary kinds that `kind` combines; `kind` alone if it is elementary."""
    if isinstance(kind, AnyGrader | BothGrader):
        return [leaf for part in kind.of for leaf in leaves(part)]
    if isinstance(kind, WeightedGrader):
        return [leaf for part in kind.parts for leaf in leaves(part.grader)]
    return [kind]


def _math(kind: MathGrader, request: GradeRequest) -> Step:
    reply = own_reply(request.response, request.problem.question, kind.boxed == "required", request.problem.shown)
    if reply is None:
        return _OPEN
    answer, note = boxed_answer(reply), ""
    if answer is None and kind.boxed == "preferred":
        found = plain_answer(reply)
        answer, note = (None, "") if found is None else (found.answer, f"no box: read from {found.sign}")
    if answer is None:
        return _NO_BOX
    settled = settle(answer, request.ground_truth)
    if settled is not None:
        return Grade(settled, answer, _settled_reason(settled)).saying(note)
    return _refused(answer, request.ground_truth) or Verification("math", answer, request.ground_truth, note=note)


def _settled_reason(outcome: Outcome) -> str:
    reasons = {Outcome.CORRECT: "the same text or number", Outcome.WRONG: "different numbers"}
    return reasons.get(outcome, "too long or too deeply nested")


def _refused(answer: str, gold: str) -> Grade | None:
    for side, text in (("", answer), ("the reference: ", gold)):
        reason = refusal(text)
        if reason is not None:
            return Grade(Outcome.UNPARSABLE, answer, f"{side}{reason}")
    return None


def _math_strict(kind: StrictMathGrader, request: GradeRequest) -> Step:
    reply = own_reply(request.response, request.problem.question, True, request.problem.shown)
    if reply is None:
        return _OPEN
    answer = boxed_answer(reply)
    if answer is None:
        return _NO_BOX
    if answer == request.ground_truth:
        return Grade(Outcome.CORRECT, answer, "the same text")
    return _refused(answer, request.ground_truth) or Verification("math_strict", answer, request.ground_truth)


def _custom(kind: CustomGrader, request: GradeRequest) -> Step:
    problem = request.problem
    known = {
        "data_source": problem.data_source,
        "question": problem.question,
        "extra_info": dict(problem.extra_info),
        "completion": kind.completion,
        "correct_from": kind.correct_from,
    }
    return Verification("custom", request.response, request.ground_truth, f"{kind.function}\n{json.dumps(known)}")


def _measure(kind: MeasureGrader, request: GradeRequest) -> Step:
    value = request.measures.get(kind.name)
    if value is None:
        return Grade(Outcome.CRASHED, None, f"no episode has measured {kind.name}")
    outcome = Outcome.CORRECT if value >= kind.correct_from else Outcome.WRONG
    return Grade(outcome, None, f"{kind.name} is {value:g}", own_reward=value)


def _reasoning_gym(kind: ReasoningGymGrader, request: GradeRequest) -> Step:
    entry = request.problem.extra_info.get(GYM_ENTRY)
    if entry is None:
        return Grade(Outcome.CRASHED, None, "no entry of reasoning-gym; the problem's source does not name this grader")
    reply = final_reply(request.response)
    if reply is None:
        return _OPEN
    answer = boxed_answer(reply) or answer_tag(reply) or reply.strip()
    if not answer:
        return Grade(Outcome.NO_ANSWER, None, "nothing after the reasoning")
    known = {
        "data_source": request.problem.data_source,
        "question": "",
        "extra_info": {GYM_ENTRY: entry},
        "completion": "text",
        "correct_from": kind.correct_from,
    }
    return Verification("custom", answer, request.ground_truth, f"{_SCORED_BY_GYM}\n{json.dumps(known)}")


def _judge(kind: JudgeGrader, request: GradeRequest) -> Step:
    reply = final_reply(request.response)
    if reply is None:
        return _OPEN
    if not reply.strip():
        return Grade(Outcome.NO_ANSWER, None, "nothing after the reasoning")
    return Judging(kind, JudgeRequest(reply.strip(), request.ground_truth, request.problem.question))


_LEAVES: dict[str, Callable[..., Step]] = {
    "math": _math,
    "math_strict": _math_strict,
    "choice": lambda kind, request: grade_choice(request),
    "exact": grade_exact,
    "format": grade_format,
    "custom": _custom,
    "measure": _measure,
    "reasoning_gym": _reasoning_gym,
    "judge": _judge,
}


def _any(kind: AnyGrader, found: Sequence[Grade]) -> Grade:
    best = next((grade for grade in found if grade.outcome is Outcome.CORRECT), _unjudged(found) or found[0])
    return _combined(kind.of, found, best, max(grade.reward for grade in found))


def _both(kind: BothGrader, found: Sequence[Grade]) -> Grade:
    rejecting = (grade for grade in found if grade.outcome is not Outcome.CORRECT and not grade.is_unjudged)
    worst = next(rejecting, _unjudged(found) or found[0])
    return _combined(kind.of, found, worst, min(grade.reward for grade in found))


def _weighted(kind: WeightedGrader, found: Sequence[Grade]) -> Grade:
    reward = sum(part.weight * grade.reward for part, grade in zip(kind.parts, found, strict=True))
    return _combined([part.grader for part in kind.parts], found, _unjudged(found) or found[0], reward)


def _unjudged(found: Sequence[Grade]) -> Grade | None:
    """The first grade without a verdict, which leaves the combination without one where it could decide it."""
    return next((grade for grade in found if grade.is_unjudged), None)


def _combined(kinds: Sequence[GraderKind], found: Sequence[Grade], deciding: Grade, reward: float) -> Grade:
    reason = "; ".join(f"{kind.kind}: {grade.reason}" for kind, grade in zip(kinds, found, strict=True))
    return replace(deciding, reason=reason, seconds=sum(grade.seconds for grade in found), own_reward=reward)

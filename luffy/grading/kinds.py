"""Each kind of grader as a list of steps, and the combination of their grades into one.

`steps` lists the steps of a request under a kind: grades that are already settled, checks for a worker process,
questions for a judge, conversations for a reward model. `conclude` takes the grades of these steps, in the same order,
and combines them.
"""

import json
import math
import re
import unicodedata
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from luffy.config.grading import (
    GYM_ENTRY,
    AnyGrader,
    BothGrader,
    CodeGrader,
    CustomGrader,
    ExactGrader,
    FormatGrader,
    GraderKind,
    JudgeGrader,
    MathGrader,
    MeasureGrader,
    ReasoningGymGrader,
    ResponseForm,
    RewardModelGrader,
    StrictMathGrader,
    WeightedGrader,
    leaves,
    parts_of,
)
from luffy.grading.choice import grade_choice
from luffy.grading.equivalence.certain import WRAPPERS, refusal, settle
from luffy.grading.extract import (
    BOX,
    THINK_CLOSE,
    THINK_OPEN,
    Extracted,
    answer_tag,
    boxed_answer,
    final_reply,
    marked_answer,
    own_reply,
    plain_answer,
    read_reference,
)
from luffy.grading.programs import CODE, last_program
from luffy.grading.request import Grade, GradeRequest, JudgeRequest, RewardRequest, Verification
from luffy.types import Message, Outcome

Step = Grade | Verification | JudgeRequest | RewardRequest
_OPEN = Grade(Outcome.NO_ANSWER, None, "the reasoning is not closed")
_SCORED_BY_GYM = "luffy.grading.checks:reasoning_gym_score"
_ANNOUNCED = re.compile("answer|solution", re.IGNORECASE)
_EDGES = " \t\n\"'`*$“”‘’"
_SETTLED = {
    Outcome.CORRECT: "the same text or number",
    Outcome.WRONG: "different numbers",
    Outcome.UNPARSABLE: "too long or too deeply nested",
}
_TAGS: dict[ResponseForm, tuple[str, ...]] = {
    "r1_zero": (THINK_OPEN, THINK_CLOSE, "<answer>", "</answer>"),
    "luffy": (THINK_OPEN, THINK_CLOSE),
}


def steps(kind: GraderKind, request: GradeRequest) -> list[Step]:
    """What the leaves of `kind` say of a request, in order: a grade, or what is left to verify."""
    failed = Grade(Outcome.CRASHED, None, "the environment failed")
    return [failed if request.has_failed else _LEAVES[leaf.kind](leaf, request) for leaf in leaves(kind)]


def conclude(kind: GraderKind, found: Iterator[Grade]) -> Grade:
    """The grade under `kind`, from those of its steps."""
    if not isinstance(kind, AnyGrader | BothGrader | WeightedGrader):
        return next(found)
    parts = parts_of(kind)
    grades = [conclude(part, found) for part in parts]
    # A grade without a verdict leaves the combination without one where it could decide it.
    deciding = next((grade for grade in grades if grade.is_unjudged), grades[0])
    rewards = [grade.reward for grade in grades]
    known = [reward for reward in rewards if not math.isnan(reward)]
    if isinstance(kind, AnyGrader):
        deciding = next((grade for grade in grades if grade.outcome is Outcome.CORRECT), deciding)
        reward = max(known) if known == rewards or deciding.outcome is Outcome.CORRECT else math.nan
    elif isinstance(kind, BothGrader):
        rejecting = (grade for grade in grades if grade.outcome is not Outcome.CORRECT and not grade.is_unjudged)
        deciding = next(rejecting, deciding)
        reward = min(known) if known == rewards else math.nan
    else:
        reward = sum(part.weight * reward for part, reward in zip(kind.parts, rewards, strict=True))
    reason = "; ".join(f"{part.kind}: {grade.reason}" for part, grade in zip(parts, grades, strict=True))
    return replace(deciding, reason=reason, seconds=sum(grade.seconds for grade in grades), own_reward=reward)


def functions_of(kind: GraderKind) -> list[str]:
    """The import paths of all functions in `kind` that workers import: the user's, and that of reasoning-gym."""
    own = [leaf.function for leaf in leaves(kind) if isinstance(leaf, CustomGrader)]
    return own + [_SCORED_BY_GYM for leaf in leaves(kind) if isinstance(leaf, ReasoningGymGrader)]


def _math(kind: MathGrader | StrictMathGrader, request: GradeRequest) -> Step:
    is_strict = isinstance(kind, StrictMathGrader)
    found = _found(request, plain_answer if isinstance(kind, MathGrader) and kind.boxed == "preferred" else None)
    if isinstance(found, Grade):
        return found
    answer, gold = found.answer, read_reference(request.ground_truth)
    if gold is None:
        return Grade(Outcome.UNPARSABLE, None, "the reference states no answer")
    note = "" if is_strict or found.sign == BOX else f"no box: read from {found.sign}"
    if is_strict and answer == gold:
        return Grade(Outcome.CORRECT, answer, "the same text")
    if not is_strict and (settled := settle(answer, gold)) is not None:
        return Grade(settled, answer, _SETTLED[settled]).saying(note)
    for side, text in (("", answer), ("the reference: ", gold)):
        reason = refusal(text)
        if reason is not None:
            return Grade(Outcome.UNPARSABLE, answer, f"{side}{reason}")
    return Verification(kind.kind, answer, gold, note=note)


def _found(request: GradeRequest, unmarked: Callable[[str], Extracted | None] | None) -> Extracted | Grade:
    """The marked answer of the final reply, or what `unmarked` finds in a reply without one; else a grade."""
    reply = own_reply(request.response, request.problem.question, unmarked is None, request.problem.shown)
    if reply is None:
        return _OPEN
    found = marked_answer(reply, request.problem.in_tag)
    if found is None and unmarked is not None:
        found = unmarked(reply)
    if found is None:
        why = "no closed <answer>, and no box" if request.problem.in_tag else "no box, or an empty one"
        return Grade(Outcome.NO_ANSWER, None, why)
    return found


def _exact(kind: ExactGrader, request: GradeRequest) -> Grade:
    found = _found(request, _line_or_plain if kind.boxed == "preferred" else None)
    if isinstance(found, Grade):
        return found
    gold = _normalised(request.ground_truth)
    equal = gold != "" and _normalised(found.answer) == gold
    note = "" if found.sign == BOX else f"read from {found.sign}"
    outcome, reason = (Outcome.CORRECT, "equal texts") if equal else (Outcome.WRONG, "different texts")
    return Grade(outcome, found.answer, reason).saying(note)


def _line_or_plain(reply: str) -> Extracted | None:
    lines = reply.strip().splitlines()
    whole = Extracted(lines[0].strip(), "a reply of one line") if len(lines) == 1 else None
    return whole if whole is not None and not _ANNOUNCED.search(reply) else plain_answer(reply) or whole


def _normalised(text: str) -> str:
    text = " ".join(unicodedata.normalize("NFKC", text).split())
    for wrapper in WRAPPERS:
        if text.startswith(wrapper) and text.endswith("}"):
            text = text[len(wrapper) : -1]
    return text.strip(_EDGES).removesuffix(".").strip(_EDGES).casefold()


def _custom(kind: CustomGrader, request: GradeRequest) -> Step:
    problem = request.problem
    known = {"question": problem.question, "extra_info": dict(problem.extra_info), "completion": kind.completion}
    return _call(kind.function, request.response, request, {**known, "correct_from": kind.correct_from})


def _call(function: str, answer: str, request: GradeRequest, known: Mapping[str, object]) -> Verification:
    context = json.dumps({"data_source": request.problem.data_source, **known})
    return Verification("custom", answer, request.ground_truth, f"{function}\n{context}")


def _measure(kind: MeasureGrader, request: GradeRequest) -> Step:
    value = request.measures.get(kind.name)
    if value is None:
        return Grade(Outcome.CRASHED, None, f"nothing has measured {kind.name}")
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
    known = {"question": "", "extra_info": {GYM_ENTRY: entry}, "completion": "text"}
    return _call(_SCORED_BY_GYM, answer, request, {**known, "correct_from": kind.correct_from})


def _format(kind: FormatGrader, request: GradeRequest) -> Grade:
    fault = fault_of_form(request.response, kind.template)
    return Grade(Outcome.WRONG if fault else Outcome.CORRECT, None, fault or f"the form of {kind.template}")


def fault_of_form(response: str, form: ResponseForm) -> str | None:
    """Return what keeps a response from having the form that a template asks for, or None; linear in its length."""
    tags = _TAGS[form]
    for tag in tags:
        if response.count(tag) != 1:
            return f"{response.count(tag)} times {tag}"
    # With each tag once, the pieces between them are in order exactly when the tags are.
    pieces = re.split("|".join(map(re.escape, tags)), response)
    if [response.find(tag) for tag in tags] != sorted(response.find(tag) for tag in tags):
        return "the tags are out of order"
    if pieces[0].strip():
        return f"text before {THINK_OPEN}"
    if not pieces[1].strip():
        return "no thoughts"
    if len(tags) == 2:
        return None if pieces[2].strip() else f"nothing after {THINK_CLOSE}"
    if pieces[2].strip() or pieces[4].strip():
        return f"text outside {tags[2]}"
    return None if pieces[3].strip() else f"nothing in {tags[2]}"


def _judge(kind: JudgeGrader, request: GradeRequest) -> Step:
    reply = final_reply(request.response)
    if reply is None:
        return _OPEN
    if not reply.strip():
        return Grade(Outcome.NO_ANSWER, None, "nothing after the reasoning")
    return JudgeRequest(kind, reply.strip(), request.ground_truth, request.problem.question)


def _reward_model(kind: RewardModelGrader, request: GradeRequest) -> Step:
    messages = request.problem.messages
    if not messages:
        return Grade(Outcome.CRASHED, None, "the prompt, which the reward model has to see, is unknown")
    return RewardRequest(kind, (*messages, Message("assistant", request.response)))


def _code(kind: CodeGrader, request: GradeRequest) -> Step:
    shown = [text for text in (request.problem.question, *request.problem.shown) if last_program(text) is not None]
    reply = own_reply(request.response, "", False, shown)
    if reply is None:
        return _OPEN
    program = last_program(answer_tag(reply) or reply if request.problem.in_tag else reply)
    if program is None:
        return Grade(Outcome.NO_ANSWER, None, "no fenced block of Python")
    return Verification(CODE, program, request.ground_truth, kind.model_dump_json())


_LEAVES: dict[str, Callable[..., Step]] = {
    "math": _math,
    "math_strict": _math,
    "choice": lambda kind, request: grade_choice(request),
    "exact": _exact,
    "format": _format,
    "custom": _custom,
    "measure": _measure,
    "reasoning_gym": _reasoning_gym,
    "judge": _judge,
    "reward_model": _reward_model,
    "code": _code,
}

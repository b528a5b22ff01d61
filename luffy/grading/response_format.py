"""Whether a response follows the template that its prompt asks for."""

import re

from luffy.config.grading import FormatGrader, ResponseForm
from luffy.grading.extract import THINK_CLOSE, THINK_OPEN
from luffy.grading.request import Grade, GradeRequest
from luffy.types import Outcome

_TAGS: dict[ResponseForm, tuple[str, ...]] = {
    "r1_zero": (THINK_OPEN, THINK_CLOSE, "<answer>", "</answer>"),
    "luffy": (THINK_OPEN, THINK_CLOSE),
}


def grade_format(kind: FormatGrader, request: GradeRequest) -> Grade:
    """Return `CORRECT` for a response that follows the template, else `WRONG` with the reason; linear in its length."""
    fault = fault_of_form(request.response, kind.template)
    return Grade(Outcome.WRONG if fault else Outcome.CORRECT, None, fault or f"the form of {kind.template}")


def fault_of_form(response: str, form: ResponseForm) -> str | None:
    """Return what keeps a response from having the form; None: it has it. Linear in its length."""
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
    return _fault_of_reply(pieces[2:], tags)


def _fault_of_reply(pieces: list[str], tags: tuple[str, ...]) -> str | None:
    """What is wrong after `</think>`, if anything; `pieces`: that text, split at the other tags."""
    if len(pieces) == 1:
        return None if pieces[0].strip() else f"nothing after {THINK_CLOSE}"
    before, answer, after = pieces
    if before.strip() or after.strip():
        return f"text outside {tags[2]}"
    return None if answer.strip() else f"nothing in {tags[2]}"

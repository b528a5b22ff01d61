"""The `exact` grader: equal texts after normalisation."""

import re
import unicodedata

from luffy.config.grading import ExactGrader
from luffy.grading.extract import Extracted, boxed_answer, own_reply, plain_answer
from luffy.grading.request import Grade, GradeRequest
from luffy.types import Outcome

_WRAPPERS = ("\\text{", "\\textbf{", "\\mathrm{", "\\mathbf{")
_ANNOUNCED = re.compile("answer|solution", re.IGNORECASE)
_EDGES = " \t\n\"'`*$“”‘’"


def grade_exact(kind: ExactGrader, request: GradeRequest) -> Grade:
    """Compare the normalised texts of the answer and the reference."""
    reply = own_reply(request.response, request.problem.question, kind.boxed == "required", request.problem.shown)
    if reply is None:
        return Grade(Outcome.NO_ANSWER, None, "the reasoning is not closed")
    found = _extracted(kind, reply)
    if found is None:
        return Grade(Outcome.NO_ANSWER, None, "no box" if kind.boxed == "required" else "no sign of an answer")
    gold = _normal(request.ground_truth, kind.ignore_case)
    equal = gold != "" and _normal(found.answer, kind.ignore_case) == gold
    note = "" if found.sign == "the box" else f"read from {found.sign}"
    return Grade(
        Outcome.CORRECT if equal else Outcome.WRONG, found.answer, "equal texts" if equal else "different texts"
    ).saying(note)


def _extracted(kind: ExactGrader, reply: str) -> Extracted | None:
    boxed = boxed_answer(reply)
    if boxed is not None or kind.boxed == "required":
        return None if boxed is None else Extracted(boxed, "the box")
    lines = reply.strip().splitlines()
    whole = Extracted(lines[0].strip(), "a reply of one line") if len(lines) == 1 else None
    if whole is not None and not _ANNOUNCED.search(reply):
        return whole
    return plain_answer(reply) or whole


def _normal(text: str, ignore_case: bool) -> str:
    text = " ".join(unicodedata.normalize("NFKC", text).split())
    for wrapper in _WRAPPERS:
        if text.startswith(wrapper) and text.endswith("}"):
            text = text[len(wrapper) : -1]
    text = text.strip(_EDGES).removesuffix(".").strip(_EDGES)
    return text.casefold() if ignore_case else text

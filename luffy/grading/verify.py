"""Mathematical equality by math-verify. Runs only in a worker process, which its parent may kill at any moment.

math-verify's own time-outs rest on SIGALRM: they fail off the main thread, reset other people's alarms and do not
stop a computation inside a C extension. They are switched off here; the parent's deadline is the only one.
"""

from collections.abc import Sequence

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify
from sympy import Basic, MatrixBase

from luffy.grading.shortcuts import normalise
from luffy.types import Outcome

_EXTRACTION = (LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig())
Parsed = Sequence[Basic | MatrixBase | str]


def verify_answer(answer: str, ground_truth: str) -> Outcome:
    """Return `CORRECT`, `WRONG`, or `UNPARSABLE` where either side cannot be read as mathematics.

    May take for ever, exhaust its memory or crash the interpreter: `9^{9^{9^9}}` is a legal answer.
    """
    gold, target = _parse(ground_truth), _parse(answer)
    if verify(gold, target, timeout_seconds=None):
        return Outcome.CORRECT
    return Outcome.WRONG if _is_read(gold) and _is_read(target) else Outcome.UNPARSABLE


def _parse(text: str) -> Parsed:
    # A reference may be a whole solution, with boxes of its own.
    boxed = text if "\\boxed" in text else f"\\boxed{{{normalise(text)}}}"
    return parse(boxed, extraction_config=_EXTRACTION, parsing_timeout=None)


def _is_read(parsed: Parsed) -> bool:
    return any(isinstance(value, Basic | MatrixBase) for value in parsed)

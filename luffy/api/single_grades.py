"""Grading a response by hand, as an experiment's stages grade it."""

import functools
import json
from collections.abc import Mapping, Sequence

from pydantic import TypeAdapter, ValidationError

from luffy.config.grading import PLAIN_KINDS, GraderKind, GradingConfig
from luffy.errors import ConfigError
from luffy.grading.kinds import functions_of
from luffy.grading.pool import GraderPool
from luffy.grading.request import Grade, GradeRequest, Problem


def grade(
    response: str,
    reference: str | float,
    grader: str | Mapping[str, object] | GraderKind = "math",
    *,
    question: str = "",
    options: Sequence[str] = (),
    measures: Mapping[str, float] | None = None,
) -> Grade:
    """The grade of `response`: its `outcome`, the answer that was `extracted`, the `reason`, and the `reward`.

    `grader` is a name (`math`, `exact`, `choice`, `code`, ...) or a kind with its settings (`{"kind": "math", "boxed":
    "preferred"}`, `{"kind": "custom", "function": "mine:score"}`). `question` and `options` (the texts of a
    multiple-choice question's options) are what it may know of the problem, `measures` what a `measure` reads. What may
    hang runs in a worker process for `grading.timeout_s` at most. Raises ConfigError for an unknown grader.
    """
    kind = grader if not isinstance(grader, str | Mapping) else _kind(grader)
    request = GradeRequest(
        response, str(reference), Problem(question, extra_info={"options": list(options)}), kind, measures or {}
    )
    if functions_of(kind):  # the user's code, which may have been edited since the last call
        with GraderPool(1, GradingConfig().timeout_s, others=[kind]) as pool:
            return pool.grade([request])[0]
    return _kept_pool().grade([request])[0]


def _kind(grader: str | Mapping[str, object]) -> GraderKind:
    if isinstance(grader, str) and grader in PLAIN_KINDS:
        return PLAIN_KINDS[grader]
    try:
        return TypeAdapter(GraderKind).validate_json(json.dumps(grader))
    except ValidationError as error:
        found = error.errors()[0]
        raise ConfigError(
            f"grader {grader!r}: {found['msg']}; there are {', '.join(PLAIN_KINDS)}, and kinds with their settings, "
            "e.g. {'kind': 'math', 'boxed': 'preferred'}"
        ) from None


@functools.cache
def _kept_pool() -> GraderPool:
    """Its worker, which takes a second to start, serves all calls; the kernel ends it with this process."""
    return GraderPool(1, GradingConfig().timeout_s)

r"""Whether the reference answers of an evaluation suite can be matched at all.

Each is graded against itself, as the boxed response `\boxed{gold}`: a reference that fails would count every right
answer as wrong. Equal texts are accepted without being parsed, so each is also compared with an unrelated number: where
the grader cannot parse the reference, only the very same text is accepted.
"""

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from luffy.config.grading import GradingConfig
from luffy.grading import GradeRequest, GraderPool, problem_of
from luffy.grading.equivalence.certain import canonical_number, normalise
from luffy.grading.kinds import leaves
from luffy.types import Outcome, Prompt

MEETS_ITSELF, FAILS, TEXT_ALONE, NOT_CHECKED = "meets_itself", "fails", "text_alone", "not_checked"
_MATHEMATICAL = {"math", "math_strict"}
_CHECKED = {*_MATHEMATICAL, "choice", "exact"}
"""Custom functions, judges and format graders may rightly reject a bare box."""
_ANOTHER = r"\boxed{\frac{\pi}{7919}}"
_AT_ONCE = 1024


@dataclass(slots=True)
class GoldCheck:
    """The result of the check."""

    counts: Counter[str] = field(default_factory=Counter)
    """Problems whose reference `meets_itself`, `fails`, is accepted as `text_alone`, or was `not_checked`."""
    findings: list[Mapping[str, object]] = field(default_factory=list)
    """Uid, finding and outcome of each reference that fails or is accepted only as text; never a text."""

    def uids(self, finding: str) -> list[str]:
        """Return the problems with that finding."""
        return [str(each["uid"]) for each in self.findings if each["finding"] == finding]


def check_golds(prompts: Iterable[Prompt], grader: GraderPool, grading: GradingConfig) -> GoldCheck:
    """Grade every reference against itself, by the grader of its row or the experiment's."""
    check = GoldCheck()
    source = iter(prompts)
    while chunk := list(itertools.islice(source, _AT_ONCE)):
        _check(chunk, grader, grading, check)
    return check


def _check(prompts: Sequence[Prompt], grader: GraderPool, grading: GradingConfig, check: GoldCheck) -> None:
    kinds = [{leaf.kind for leaf in leaves(grading.grader(prompt.grader))} for prompt in prompts]
    checked = [prompt for prompt, kind in zip(prompts, kinds, strict=True) if kind <= _CHECKED]
    read = [
        prompt
        for prompt, kind in zip(prompts, kinds, strict=True)
        if kind <= _CHECKED and kind & _MATHEMATICAL and canonical_number(normalise(prompt.ground_truth)) is None
    ]
    check.counts[NOT_CHECKED] += len(prompts) - len(checked)
    failing = {}
    boxed = [f"\\boxed{{{prompt.ground_truth}}}" for prompt in checked]
    for prompt, outcome in zip(checked, _graded(checked, boxed, grader), strict=True):
        if outcome is not Outcome.CORRECT:
            failing[prompt.uid] = (FAILS, outcome)
    for prompt, outcome in zip(read, _graded(read, [_ANOTHER] * len(read), grader), strict=True):
        if outcome not in (Outcome.WRONG, Outcome.CORRECT):
            failing.setdefault(prompt.uid, (TEXT_ALONE, outcome))
    for uid, (finding, outcome) in failing.items():
        check.counts[finding] += 1
        check.findings.append({"uid": uid, "finding": finding, "outcome": outcome.value})
    check.counts[MEETS_ITSELF] += len(checked) - len(failing)


def _graded(prompts: Sequence[Prompt], responses: Sequence[str], grader: GraderPool) -> list[Outcome]:
    requests = [
        GradeRequest(response, prompt.ground_truth, problem_of(prompt))
        for prompt, response in zip(prompts, responses, strict=True)
    ]
    return [grade.outcome for grade in grader.grade(requests)]

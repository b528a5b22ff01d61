"""Decides which answers are good enough to learn from: graded as the experiment grades, by the rules for traces."""

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from luffy.data.kept_answers import UNDECODED, GradedAnswer
from luffy.data.row_filters import FilteredRow, Rejection, RowFilter
from luffy.data.templates import with_opened_thinking
from luffy.grading.pool import GraderPool
from luffy.grading.request import GradeRequest, problem_of, require_verdicts
from luffy.synthesis.answer_log import AnswerLog, AnswerStatus, TeacherAnswer
from luffy.synthesis.teachers import Question
from luffy.types import Origin, Outcome, Prompt, Trace

EMPTY = "empty"
"""The outcome of an answer without text."""
_AT_ONCE = 512
"""Answers in memory at the same time."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The outcome of one question."""

    uid: str
    key: str
    """Where the answer is in the log."""
    outcome: str
    """What grading found (`luffy.types.Outcome`); `truncated`, `refused`, `failed` or `empty` without grading."""
    rejection: Rejection | None
    """Why a correct answer does not become a trace."""
    text_hash: str
    """Equal for texts that differ in spacing alone."""

    @property
    def is_correct(self) -> bool:
        return self.outcome == Outcome.CORRECT

    @property
    def is_usable(self) -> bool:
        """Whether the answer may become a trace."""
        return self.is_correct and self.rejection is None


class AnswerAssessor:
    """Reaches a verdict on answers in the log; the same answers always get the same one."""

    def __init__(self, log: AnswerLog, rules: RowFilter, grader: GraderPool) -> None:
        self._log = log
        self._rules = rules
        self._grader = grader

    def assess(self, questions: Sequence[Question], keys: Sequence[str]) -> list[Verdict]:
        """One verdict per question, whose answer is under the key at its place; LostError where a judge is gone."""
        found: list[Verdict] = []
        for start in range(0, len(keys), _AT_ONCE):
            part = slice(start, start + _AT_ONCE)
            found += self._assess(questions[part], keys[part])
        return found

    def _assess(self, questions: Sequence[Question], keys: Sequence[str]) -> list[Verdict]:
        answers = [self._log.read(key) for key in keys]
        outcomes = [_ungraded(answer) for answer in answers]
        graded = iter(
            self._graded(
                [
                    (_with_trace(question.prompt, answer), answer.measures)
                    for question, answer, outcome in zip(questions, answers, outcomes, strict=True)
                    if outcome is None
                ]
            )
        )
        verdicts = []
        for question, key, answer, outcome in zip(questions, keys, answers, outcomes, strict=True):
            uid, text_hash = question.prompt.uid, _hash_of(answer.text)
            if outcome is not None:
                verdicts.append(Verdict(uid, key, outcome, None, text_hash))
                continue
            row = next(graded)
            is_correct = row.outcomes[0] is Outcome.CORRECT
            rejection = _rejection(row, answer) if is_correct else None
            verdicts.append(Verdict(uid, key, row.outcomes[0].value, rejection, text_hash))
        return verdicts

    def _graded(self, answered: Sequence[tuple[Prompt, Mapping[str, float]]]) -> list[FilteredRow]:
        """The findings for prompts with an answer as their only trace, given the measures of its episode."""
        prompts = self._rules.normalised([prompt for prompt, _ in answered])
        requests = [
            GradeRequest(prompt.traces[0].reply, prompt.ground_truth, problem_of(prompt), measures=measures)
            for prompt, (_, measures) in zip(prompts, answered, strict=True)
        ]
        grades = self._grader.grade(requests)
        require_verdicts(grades, "answers", "answers are kept, and the same command grades them")
        return self._rules.judged(prompts, [[grade.outcome] for grade in grades])


def graded_answer(
    answer: TeacherAnswer, author: str, model: str, decoding: str, origin: Origin | None = None
) -> GradedAnswer:
    """A usable answer in the form that the rule for keeping answers takes."""
    return GradedAnswer(
        text=answer.text if answer.turns else with_opened_thinking(answer.text),
        num_tokens=answer.num_tokens,
        outcome=Outcome.CORRECT,
        is_complete=answer.status is AnswerStatus.COMPLETE,
        author=author,
        model=model,
        decoding=decoding,
        logprobs=answer.logprobs,
        turns=answer.turns,
        origin=origin,
    )


def _ungraded(answer: TeacherAnswer) -> str | None:
    """The outcome of an answer that is not graded; None for one that is."""
    if answer.status is not AnswerStatus.COMPLETE:
        return answer.status.value
    return None if answer.text.strip() else EMPTY


def _with_trace(prompt: Prompt, answer: TeacherAnswer) -> Prompt:
    trace = Trace(answer.text, author="", logprobs=answer.logprobs, turns=answer.turns)
    return dataclasses.replace(prompt, traces=(trace,))


def _rejection(row: FilteredRow, answer: TeacherAnswer) -> Rejection | None:
    """Why the answer, which is the row's only trace, is not usable."""
    if UNDECODED in answer.text:
        return Rejection.TRACE_UNDECODED
    if row.rejected_traces:
        return row.rejected_traces[0][1]
    return row.reason


def _hash_of(text: str) -> str:
    return hashlib.blake2b(" ".join(text.split()).encode(), digest_size=16).hexdigest()

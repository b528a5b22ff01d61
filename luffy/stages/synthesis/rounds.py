"""One teacher's turn: the first sample of every prompt, then the second, until the prompts or the budget are done.

Answers that are good enough to learn from are those that are graded correct, as the experiment grades, and pass the
rules for traces.
"""

import dataclasses
import hashlib
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from luffy.config.answers import RewriteConfig, SynthesizeConfig, TeacherConfig
from luffy.config.group import fill_slots
from luffy.data.kept_answers import UNDECODED, GradedAnswer
from luffy.data.row_filters import FilteredRow, Rejection, RowFilter
from luffy.data.synthesis_card import TeacherCard
from luffy.data.templates import with_opened_thinking
from luffy.grading.pool import GraderPool
from luffy.grading.request import GradeRequest, problem_of, require_verdicts
from luffy.seeds import derive_seed
from luffy.stages.answers.store import AnswerStore, ModelAnswer
from luffy.stages.synthesis.ledger import Usage
from luffy.stages.synthesis.teachers import Question, Teacher
from luffy.types import FinishReason, Message, Origin, Outcome, Prompt, Trace

_EMPTY = "empty"
"""The outcome of an answer without text."""
_UNGRADED = {
    FinishReason.LENGTH: "truncated",
    FinishReason.TURN_LENGTH: "truncated",
    FinishReason.TURNS: "out_of_turns",
    FinishReason.ENVIRONMENT_ERROR: "crashed",
    FinishReason.REFUSED: "refused",
    FinishReason.FAILED: "failed",
}
"""Outcomes of answers that are not graded, by how they ended."""
_AT_ONCE = 512
"""Answers in memory at the same time."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The outcome of one question."""

    uid: str
    key: str
    """The one of its answer in the store."""
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


@dataclass(slots=True)
class TeacherTurn:
    """The questions to one teacher, and their outcomes."""

    name: str
    prompts: int
    """Prompts intended for the teacher."""
    origin: Origin | None = None
    """Origin of its answers where training data is rewritten."""
    verdicts: dict[str, list[Verdict]] = field(default_factory=lambda: defaultdict(list))
    """By prompt, in the order of samples."""
    not_asked: int = 0
    """Questions that the budget did not allow, at most: later answers might have made some of them unnecessary."""
    used: Usage = field(default_factory=Usage)
    cost: float = 0.0

    @property
    def title(self) -> str:
        """Name of the turn on the card."""
        return f"{self.name}, rewriting" if self.origin is Origin.REWRITTEN else self.name

    def usable(self, uid: str) -> list[Verdict]:
        """The prompt's answers that may become traces, equal texts once."""
        found: dict[str, Verdict] = {}
        for verdict in self.verdicts.get(uid, ()):
            if verdict.is_usable:
                found.setdefault(verdict.text_hash, verdict)
        return list(found.values())


def take_turn(
    name: str,
    teacher: Teacher,
    prompts: Sequence[Prompt],
    config: SynthesizeConfig,
    seed: int,
    assessor: "AnswerAssessor",
    origin: Origin | None = None,
) -> TeacherTurn:
    """Ask one teacher about `prompts`, whose seeds depend on (seed, teacher, uid, sample) alone; to be rewritten, they
    are asked with their first trace."""
    turn = TeacherTurn(name, len(prompts), origin)
    rewrite = config.rewrite if origin is Origin.REWRITTEN else None
    num_samples = config.teachers[name].num_samples if rewrite is None else rewrite.num_samples
    purpose, enough = "synthesize" if rewrite is None else "rewrite", config.keep.max_per_prompt
    for sample in range(num_samples):
        left = [p for p in prompts if not (config.stop_when_kept and len(turn.usable(p.uid)) >= enough)]
        questions = [
            Question(
                replace(p, traces=()),
                sample,
                derive_seed(seed, purpose, name, p.uid, sample),
                () if rewrite is None else with_trace(p, rewrite),
            )
            for p in left
        ]
        keys = teacher.ask(questions)
        for verdict in assessor.assess(questions[: len(keys)], keys):
            turn.verdicts[verdict.uid].append(verdict)
        if len(keys) < len(questions):
            turn.not_asked = len(questions) - len(keys) + (num_samples - sample - 1) * len(questions)
            break
    return turn


def with_trace(prompt: Prompt, rewrite: RewriteConfig) -> tuple[Message, ...]:
    """The prompt's messages, the last of them with its first trace."""
    *before, question = prompt.messages
    text = fill_slots(rewrite.template, {"prompt": question.content, "trace": prompt.traces[0].text})
    return (*before, replace(question, content=text))


def teacher_card(turn: TeacherTurn, config: TeacherConfig, traces: int, with_logprobs: int) -> TeacherCard:
    """The card of one teacher, of whose answers `traces` are kept, `with_logprobs` of them with log-probabilities."""
    verdicts = [verdict for each in turn.verdicts.values() for verdict in each]
    outcomes = Counter(verdict.outcome for verdict in verdicts)
    rejected = Counter(verdict.rejection.value for verdict in verdicts if verdict.rejection is not None)
    return TeacherCard(
        model=config.model,
        decoding=config.decoding,
        max_response_tokens=config.max_response_tokens,
        prompts=turn.prompts,
        questions=len(verdicts),
        answers=len(verdicts) - outcomes[FinishReason.FAILED],
        correct=sum(verdict.is_correct for verdict in verdicts),
        solved=sum(any(verdict.is_correct for verdict in each) for each in turn.verdicts.values()),
        outcomes=dict(sorted(outcomes.items())),
        rejected=dict(sorted(rejected.items())),
        traces=traces,
        with_logprobs=with_logprobs,
        prompt_tokens=turn.used.prompt_tokens,
        num_tokens=turn.used.num_tokens,
        cost=turn.cost if config.price is not None else None,
        not_asked=turn.not_asked,
    )


class AnswerAssessor:
    """Reaches a verdict on answers in the store; the same answers always get the same one."""

    def __init__(self, store: AnswerStore, rules: RowFilter, grader: GraderPool) -> None:
        self._store = store
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
        answers = [self._store[key] for key in keys]
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
            uid, text_hash = question.prompt.uid, _hash_of(_text(answer))
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
    answer: ModelAnswer, author: str, model: str, decoding: str, origin: Origin | None = None
) -> GradedAnswer:
    """A usable answer in the form that the rule for keeping answers takes."""
    return GradedAnswer(
        text=_text(answer) if answer.turns else with_opened_thinking(_text(answer)),
        num_tokens=answer.num_tokens,
        outcome=Outcome.CORRECT,
        is_complete=answer.finish_reason is FinishReason.STOP,
        author=author,
        model=model,
        decoding=decoding,
        logprobs=answer.logprobs,
        turns=answer.turns,
        origin=origin,
    )


def _ungraded(answer: ModelAnswer) -> str | None:
    """The outcome of an answer that is not graded; None for one that is."""
    if answer.finish_reason is not FinishReason.STOP:
        return _UNGRADED[answer.finish_reason]
    return None if _text(answer).strip() else _EMPTY


def _text(answer: ModelAnswer) -> str:
    assert answer.text is not None
    return answer.text


def _with_trace(prompt: Prompt, answer: ModelAnswer) -> Prompt:
    trace = Trace(_text(answer), author="", logprobs=answer.logprobs, turns=answer.turns)
    return dataclasses.replace(prompt, traces=(trace,))


def _rejection(row: FilteredRow, answer: ModelAnswer) -> Rejection | None:
    """Why the answer, which is the row's only trace, is not usable."""
    if UNDECODED in _text(answer):
        return Rejection.TRACE_UNDECODED
    if row.rejected_traces:
        return row.rejected_traces[0][1]
    return row.reason


def _hash_of(text: str) -> str:
    return hashlib.blake2b(" ".join(text.split()).encode(), digest_size=16).hexdigest()

"""One teacher's turn: the first sample of every prompt, then the second, until the prompts or the budget are done.

Answers that are good enough to learn from are those that are graded correct, as the experiment grades, and pass the
rules for traces.
"""

import hashlib
import logging
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from luffy.config.answers import RewriteConfig, SynthesizeConfig, TeacherConfig
from luffy.config.group import fill_slots
from luffy.data.kept_answers import UNDECODED
from luffy.data.row_filters import Rejection, RowFilter
from luffy.data.splits import WrittenData
from luffy.data.synthesis_card import TeacherCard
from luffy.grading.pool import GraderPool
from luffy.grading.request import GradeRequest, problem_of, require_verdicts
from luffy.seeds import derive_seed
from luffy.stages.answers.clients import RenderedPrompt, SampleRequest
from luffy.stages.answers.store import AnswerStore, ModelAnswer
from luffy.stages.synthesis.ledger import Usage
from luffy.stages.synthesis.teachers import Teacher
from luffy.types import FinishReason, Origin, Outcome, Prompt, Trace

logger = logging.getLogger(__name__)
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
        return f"{self.name}, rewriting" if self.origin is Origin.REWRITTEN else self.name

    def usable(self, uid: str) -> list[Verdict]:
        """The prompt's answers that may become traces, equal texts once."""
        found: dict[str, Verdict] = {}
        for verdict in self.verdicts.get(uid, ()):
            if verdict.is_usable:
                found.setdefault(verdict.text_hash, verdict)
        return list(found.values())


def take_turn(
    teacher: Teacher,
    prompts: Sequence[Prompt],
    config: SynthesizeConfig,
    seed: int,
    rules: RowFilter,
    grader: GraderPool,
    origin: Origin | None = None,
) -> TeacherTurn:
    """Ask one teacher about `prompts`, whose seeds depend on (seed, teacher, uid, sample) alone; to be rewritten, they
    are asked with their first trace."""
    name, ledger = teacher.name, teacher.ledger
    turn = TeacherTurn(name, len(prompts), origin)
    before, paid = ledger.used(name), ledger.cost(name)
    rewrite = config.rewrite if origin is Origin.REWRITTEN else None
    num_samples = config.teachers[name].num_samples if rewrite is None else rewrite.num_samples
    purpose, enough = "synthesize" if rewrite is None else "rewrite", config.keep.max_per_prompt
    for sample in range(num_samples):
        left = [p for p in prompts if not (config.stop_when_kept and len(turn.usable(p.uid)) >= enough)]
        questions = [
            SampleRequest(
                "",
                replace(p, traces=()),
                RenderedPrompt("", messages=teacher.messages(p if rewrite is None else with_trace(p, rewrite))),
                sample,
                derive_seed(seed, purpose, name, p.uid, sample),
            )
            for p in left
        ]
        asked = teacher.ask(questions)
        for start in range(0, len(asked), _AT_ONCE):
            for verdict in _verdicts(asked[start : start + _AT_ONCE], teacher.store, rules, grader):
                turn.verdicts[verdict.uid].append(verdict)
        if len(asked) < len(questions):
            turn.not_asked = len(questions) - len(asked) + (num_samples - sample - 1) * len(questions)
            break
    turn.used, turn.cost = ledger.used(name) - before, ledger.cost(name) - paid
    logger.info("%s: %d prompts with a usable answer", turn.title, sum(bool(turn.usable(p.uid)) for p in prompts))
    return turn


def with_trace(prompt: Prompt, rewrite: RewriteConfig) -> Prompt:
    """The prompt, the last of whose messages shows its first trace."""
    *before, question = prompt.messages
    text = fill_slots(rewrite.template, {"prompt": question.content, "trace": prompt.traces[0].text})
    return replace(prompt, messages=(*before, replace(question, content=text)))


def teacher_card(turn: TeacherTurn, config: TeacherConfig, written: WrittenData) -> TeacherCard:
    """The card of one turn; where data is rewritten, its traces are those of its origin."""
    verdicts = [verdict for each in turn.verdicts.values() for verdict in each]
    outcomes = Counter(verdict.outcome for verdict in verdicts)
    rejected = Counter(verdict.rejection.value for verdict in verdicts if verdict.rejection is not None)
    key = turn.name if turn.origin is None else f"{turn.name}:{turn.origin}"
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
        traces=written.traces.get(key, 0),
        with_logprobs=written.with_logprobs.get(key, 0),
        prompt_tokens=turn.used.prompt_tokens,
        num_tokens=turn.used.num_tokens,
        cost=turn.cost if config.price is not None else None,
        not_asked=turn.not_asked,
    )


def _verdicts(
    samples: Sequence[SampleRequest], store: AnswerStore, rules: RowFilter, grader: GraderPool
) -> list[Verdict]:
    """One verdict per question, always the same for the same answers; LostError where a judge is gone."""
    answers = [store[sample.key] for sample in samples]
    # None: to be graded.
    outcomes = [_UNGRADED.get(answer.finish_reason, None if _text(answer).strip() else _EMPTY) for answer in answers]
    answered = [
        (
            replace(sample.prompt, traces=(Trace(_text(answer), "", logprobs=answer.logprobs, turns=answer.turns),)),
            answer.measures,
        )
        for sample, answer, outcome in zip(samples, answers, outcomes, strict=True)
        if outcome is None
    ]
    prompts = rules.normalised([prompt for prompt, _ in answered])
    requests = [
        GradeRequest(prompt.traces[0].reply, prompt.ground_truth, problem_of(prompt), measures=measures)
        for prompt, (_, measures) in zip(prompts, answered, strict=True)
    ]
    grades = grader.grade(requests)
    require_verdicts(grades, "answers", "answers are kept, and the same command grades them")
    rows = iter(rules.judged(prompts, [[grade.outcome] for grade in grades]))
    verdicts = []
    for sample, answer, outcome in zip(samples, answers, outcomes, strict=True):
        rejection = None
        if outcome is None:
            row = next(rows)
            outcome = row.outcomes[0].value
            if outcome == Outcome.CORRECT:
                rejection = row.rejected_traces[0][1] if row.rejected_traces else row.reason
                if UNDECODED in _text(answer):
                    rejection = Rejection.TRACE_UNDECODED
        text_hash = hashlib.blake2b(" ".join(_text(answer).split()).encode(), digest_size=16).hexdigest()
        verdicts.append(Verdict(sample.prompt.uid, sample.key, outcome, rejection, text_hash))
    return verdicts


def _text(answer: ModelAnswer) -> str:
    assert answer.text is not None
    return answer.text

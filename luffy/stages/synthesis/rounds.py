"""One teacher's turn: the first sample of every prompt, then the second, until the prompts or the budget are done.

A teacher answers questions in order, each answer into the store, until the ledger's limit is reached.

Answers that are good enough to learn from are those that are graded correct, as the experiment grades, and pass the
rules for traces.
"""

import hashlib
import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from transformers import PreTrainedTokenizerBase

from luffy.config.answers import RewriteConfig, TeacherConfig
from luffy.config.evaluation import SuiteProtocol
from luffy.config.group import fill_slots
from luffy.config.settings import SynthesizeSettings
from luffy.data.kept_answers import UNDECODED
from luffy.data.prompt_templates import OWN
from luffy.data.row_filters import Rejection, RowFilter, with_instructions
from luffy.data.splits import WrittenData
from luffy.data.synthesis_card import TeacherCard
from luffy.grading.judge import Judges
from luffy.grading.pool import GraderPool
from luffy.grading.request import GradeRequest, problem_of, require_verdicts
from luffy.seeds import derive_seed
from luffy.stages.answers.asker import Asker, Progress
from luffy.stages.answers.clients import Questions, RenderedPrompt, SampleRequest
from luffy.stages.answers.store import AnswerStore, ModelAnswer
from luffy.stages.program import StageContext
from luffy.stages.synthesis.ledger import Ledger, Usage
from luffy.types import FinishReason, Message, Origin, Outcome, Prompt, Trace

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


@dataclass(slots=True)
class Work:
    """State shared by the turns of all teachers."""

    settings: SynthesizeSettings
    context: StageContext
    tokenizer: PreTrainedTokenizerBase
    """Tokenizer of the policy."""
    row_filter: RowFilter
    grader: GraderPool
    stores: Mapping[bool, AnswerStore]
    """The answers of teachers behind an endpoint (True) and of teachers in a model folder (False)."""
    ledger: Ledger
    judges: Judges
    """Judges for the measures of episodes that need one."""
    instructions: Mapping[str | None, str]
    """The environment's, by data source."""
    answered: int = 0
    total: int = 0
    """Upper bound on the number of questions."""

    def store_of(self, name: str) -> AnswerStore:
        return self.stores[self.settings.synthesize.teachers[name].endpoint is not None]

    def progress(self, count: int) -> None:
        self.answered += count
        self.context.events.progress(self.answered, self.total)

    def messages(self, name: str, prompt: Prompt) -> tuple[Message, ...]:
        """The prompt's, under the teacher's own system prompt if it has one; this gets the environment's instructions,
        which the prompt's own has."""
        system = self.settings.synthesize.teachers[name].system_prompt
        if system is None:
            return prompt.messages
        others = tuple(message for message in prompt.messages if message.role != "system")
        own = (Message("system", system), *others) if system else others
        if not self.instructions:
            return own
        return with_instructions([replace(prompt, messages=own)], self.instructions)[0].messages


@dataclass(slots=True)
class Teacher:
    """An opened teacher; of the asker, it is the budget."""

    name: str
    work: Work
    asker: Asker
    keyed: Callable[[Sequence[SampleRequest]], list[SampleRequest]]
    """The questions as the model takes them, with the keys of their answers."""
    most: Callable[[SampleRequest], Usage]
    """The most that the answer to a question uses."""
    progress: Progress
    """Called with batches of new answers."""
    finish: Callable[[], None] = lambda: None
    """Called when all questions of a round have been asked."""
    num_admitted: int = 0

    def ask(self, questions: Sequence[SampleRequest]) -> list[SampleRequest]:
        """Get the answers to questions, in order, into the store; returns these questions, with their keys there.

        Questions that the budget does not allow are left out at the end.
        """
        config, store = self.work.settings.synthesize.teachers[self.name], self.work.store_of(self.name)
        samples = self.keyed(questions)
        store.adopt(sample.key for sample in samples)
        self.num_admitted = 0
        protocol = SuiteProtocol(config.temperature, config.top_p, 1, OWN, (), None)
        asked = Questions(self.name, "", protocol, config.max_response_tokens, samples)
        self.asker.ask([asked], store, self.progress, self)
        self.finish()
        return samples[: self.num_admitted]

    @property
    def may_be_spent(self) -> bool:
        return self.work.ledger.may_be_spent

    def admit(self, sample: SampleRequest, known: ModelAnswer | None) -> bool:
        if self.work.ledger.is_spent:
            return False
        self.num_admitted += 1
        if known is None:
            self.work.ledger.reserve(self.name, self.most(sample))
        else:
            self.work.ledger.settle(self.name, Usage.of(known))
            self.work.progress(1)
        return True

    def settle(self, sample: SampleRequest, answer: ModelAnswer) -> None:
        self.work.ledger.settle(self.name, Usage.of(answer), self.most(sample))


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
            if verdict.is_correct and verdict.rejection is None:
                found.setdefault(verdict.text_hash, verdict)
        return list(found.values())


def take_turn(teacher: Teacher, prompts: Sequence[Prompt], origin: Origin | None = None) -> TeacherTurn:
    """Ask one teacher about `prompts`, whose seeds depend on (seed, teacher, uid, sample) alone; to be rewritten, they
    are asked with their first trace."""
    name, work = teacher.name, teacher.work
    config, ledger = work.settings.synthesize, work.ledger
    turn = TeacherTurn(name, len(prompts), origin)
    before, paid = ledger.used[name], ledger.cost(name)
    rewrite = config.rewrite if origin is Origin.REWRITTEN else None
    num_samples = config.teachers[name].num_samples if rewrite is None else rewrite.num_samples
    purpose, enough = "synthesize" if rewrite is None else "rewrite", config.keep.max_per_prompt
    for sample in range(num_samples):
        left = [p for p in prompts if not (config.stop_when_kept and len(turn.usable(p.uid)) >= enough)]
        questions = [
            SampleRequest(
                "",
                replace(p, traces=()),
                RenderedPrompt("", messages=work.messages(name, p if rewrite is None else with_trace(p, rewrite))),
                sample,
                derive_seed(work.settings.seed, purpose, name, p.uid, sample),
            )
            for p in left
        ]
        asked = teacher.ask(questions)
        for start in range(0, len(asked), _AT_ONCE):
            for verdict in _verdicts(asked[start : start + _AT_ONCE], work.store_of(name), work):
                turn.verdicts[verdict.uid].append(verdict)
        if len(asked) < len(questions):
            turn.not_asked = len(questions) - len(asked) + (num_samples - sample - 1) * len(questions)
            break
    turn.used, turn.cost = ledger.used[name] - before, ledger.cost(name) - paid
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


def _verdicts(samples: Sequence[SampleRequest], store: AnswerStore, work: Work) -> list[Verdict]:
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
    prompts = work.row_filter.normalised([prompt for prompt, _ in answered])
    template = work.row_filter.template
    requests = [
        GradeRequest(prompt.traces[0].reply, prompt.ground_truth, problem_of(prompt, template), measures=measures)
        for prompt, (_, measures) in zip(prompts, answered, strict=True)
    ]
    grades = work.grader.grade(requests)
    require_verdicts(grades, "answers", "answers are kept, and the same command grades them")
    rows = iter(work.row_filter.judged(prompts, [[grade.outcome] for grade in grades]))
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

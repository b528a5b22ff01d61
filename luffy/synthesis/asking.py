"""One teacher's turn: the first sample of every prompt, then the second, until the prompts or the budget are done."""

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from luffy.config.answers import RewriteConfig, SynthesizeConfig, TeacherConfig
from luffy.config.group import fill_slots
from luffy.seeds import derive_seed
from luffy.synthesis.answer_log import AnswerStatus
from luffy.synthesis.ledger import Usage
from luffy.synthesis.synthesis_card import TeacherCard
from luffy.synthesis.teachers import Question, Teacher
from luffy.synthesis.verdicts import Verdict
from luffy.types import Message, Origin, Prompt

Assess = Callable[[Sequence[Question], Sequence[str]], list[Verdict]]
"""`AnswerAssessor.assess`."""


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
    assess: Assess,
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
        for verdict in assess(questions[: len(keys)], keys):
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
        answers=len(verdicts) - outcomes[AnswerStatus.FAILED],
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

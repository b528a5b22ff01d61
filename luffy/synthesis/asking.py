"""One teacher's turn: the first sample of every prompt, then the second, until the prompts or the budget are done."""

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from luffy.config.synthesis import SynthesizeConfig, TeacherConfig
from luffy.seeds import derive_seed
from luffy.synthesis.answer_log import AnswerStatus
from luffy.synthesis.ledger import Usage
from luffy.synthesis.synthesis_card import TeacherCard
from luffy.synthesis.teachers import Question, Teacher
from luffy.synthesis.verdicts import Verdict
from luffy.types import Prompt

Assess = Callable[[Sequence[Question], Sequence[str]], list[Verdict]]
"""`AnswerAssessor.assess`."""


@dataclass(slots=True)
class TeacherTurn:
    """What one teacher was asked, and what became of it."""

    name: str
    prompts: int
    """Prompts that the teacher was to be asked."""
    verdicts: dict[str, list[Verdict]] = field(default_factory=lambda: defaultdict(list))
    """By prompt, in the order of samples."""
    not_asked: int = 0
    """Questions that the budget did not allow, at most: later answers might have made some of them unnecessary."""
    used: Usage = field(default_factory=Usage)
    cost: float = 0.0

    def usable(self, uid: str) -> list[Verdict]:
        """The prompt's answers that may become traces, equal texts once."""
        found: dict[str, Verdict] = {}
        for verdict in self.verdicts.get(uid, ()):
            if verdict.is_usable:
                found.setdefault(verdict.text_hash, verdict)
        return list(found.values())


def take_turn(
    name: str, teacher: Teacher, prompts: Sequence[Prompt], config: SynthesizeConfig, seed: int, assess: Assess
) -> TeacherTurn:
    """Ask one teacher about `prompts`, whose seeds depend on (seed, teacher, uid, sample) alone."""
    turn = TeacherTurn(name, len(prompts))
    num_samples, enough = config.teachers[name].num_samples, config.keep.max_per_prompt
    for sample in range(num_samples):
        left = [p for p in prompts if not (config.stop_when_kept and len(turn.usable(p.uid)) >= enough)]
        questions = [Question(p, sample, derive_seed(seed, "synthesize", name, p.uid, sample)) for p in left]
        keys = teacher.ask(questions)
        for verdict in assess(questions[: len(keys)], keys):
            turn.verdicts[verdict.uid].append(verdict)
        if len(keys) < len(questions):
            turn.not_asked = len(questions) - len(keys) + (num_samples - sample - 1) * len(questions)
            break
    return turn


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

"""The summary of a synthesis: questions, answers, usage and kept traces of each teacher."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class TeacherCard:
    """One teacher's part."""

    model: str
    decoding: str
    max_response_tokens: int
    prompts: int
    """Intended for it; `questions` were sent to it."""
    questions: int
    answers: int
    """Answers with text or without, of any length; not those that failed."""
    correct: int
    solved: int
    """Prompts with a correct answer."""
    outcomes: Mapping[str, int]
    rejected: Mapping[str, int]
    """Correct answers that are no traces, by reason."""
    traces: int
    with_logprobs: int
    """Traces with the teacher's log-probabilities."""
    prompt_tokens: int
    num_tokens: int
    cost: float | None
    """None: the teacher has no price."""
    not_asked: int
    """Questions that the budget did not allow, at most."""

    @property
    def pass_rate(self) -> float:
        """Correct answers among all answers; 0 without any."""
        return self.correct / self.answers if self.answers else 0.0


@dataclass(frozen=True, slots=True)
class SynthesisCard:
    """All of `card.json`."""

    prompts: int
    """Training prompts, those included that lost all traces that they came with."""
    asked_about: int
    """Prompts intended for teachers; `given` got a trace."""
    given: int
    without: tuple[str, ...]
    """Uids of prompts that were sent and have no trace: no answer was correct and usable."""
    never_asked: tuple[str, ...]
    """Uids of prompts that the budget did not reach."""
    train_rows: int
    sft_rows: int
    max_tokens: int | None
    max_cost: float | None
    teachers: Mapping[str, TeacherCard]
    origins: Mapping[str, int] = field(default_factory=dict)
    """Traces of the training rows by origin (own, rewritten, expert); empty where the data was not rewritten."""

    @property
    def num_tokens(self) -> int:
        return sum(teacher.prompt_tokens + teacher.num_tokens for teacher in self.teachers.values())

    @property
    def cost(self) -> float | None:
        """What all teachers cost; None where none has a price."""
        costs = [teacher.cost for teacher in self.teachers.values() if teacher.cost is not None]
        return sum(costs) if costs else None

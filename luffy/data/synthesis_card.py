"""The summary of a synthesis: questions, answers, usage and kept traces of each teacher."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from pydantic import TypeAdapter

from luffy.files import write_atomic
from luffy.markdown_text import markdown_cell

_NAMED = 10
"""Prompts that `card.md` names; `card.json` names all."""


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


def write_synthesis_card(out: Path, card: SynthesisCard) -> None:
    """Write `card.json` and `card.md`."""
    write_atomic(out / "card.json", json.dumps(asdict(card), indent=1) + "\n")
    used = f"Used: {card.num_tokens:,} tokens of prompts and answers{_of(card.max_tokens, ',')}"
    if card.cost is not None:
        used += f", cost {card.cost:.4f}{_of(card.max_cost, 'g')}"
    origins = ", ".join(f"{count} {origin}" for origin, count in card.origins.items())
    lines = [
        "# Synthesis",
        "",
        f"{card.given} of {card.asked_about} prompts got a trace; teachers were asked about {card.asked_about} of "
        f"{card.prompts} training prompts. train.parquet has {card.train_rows} rows, sft.parquet {card.sft_rows}.",
        "",
        f"{len(card.without)} were asked and have no usable answer{_named(card.without)}.",
        f"{len(card.never_asked)} were never asked{_named(card.never_asked)}.",
        "",
        *([f"Traces after rewriting: {origins}.", ""] if origins else []),
        f"{used}.",
        "",
        "| teacher | model | decoding | questions | correct | pass rate | prompts solved | traces | with "
        "log-probabilities | tokens of prompts | tokens of answers | cost | not asked, at most |",
        "|" + "---|" * 13,
    ]
    reasons = []
    for name, teacher in card.teachers.items():
        cells = (
            name,
            teacher.model,
            f"{teacher.decoding}, at most {teacher.max_response_tokens} tokens",
            f"{teacher.questions} about {teacher.prompts} prompts",
            str(teacher.correct),
            f"{teacher.pass_rate:.3f}",
            f"{teacher.solved} of {teacher.prompts}",
            str(teacher.traces),
            str(teacher.with_logprobs),
            f"{teacher.prompt_tokens:,}",
            f"{teacher.num_tokens:,}",
            "-" if teacher.cost is None else f"{teacher.cost:.4f}",
            str(teacher.not_asked),
        )
        lines.append(f"| {' | '.join(map(markdown_cell, cells))} |")
        rejected = f" Correct, but no trace: {_counted(teacher.rejected)}." if teacher.rejected else ""
        reasons.append(f"Answers of {name}: {_counted(teacher.outcomes) or 'none'}.{rejected}")
    write_atomic(out / "card.md", "\n".join([*lines, "", *reasons]) + "\n")


def read_synthesis_card(path: Path) -> SynthesisCard:
    """The card in a `card.json`."""
    return TypeAdapter(SynthesisCard).validate_json(path.read_bytes())


def _counted(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in counts.items())


def _named(uids: Sequence[str]) -> str:
    shown = ", ".join(uids[:_NAMED])
    return "" if not uids else f": {shown}" + (", ... (all in card.json)" if len(uids) > _NAMED else "")


def _of(limit: float | None, form: str) -> str:
    return "" if limit is None else f" of {limit:{form}} allowed"

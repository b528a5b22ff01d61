"""How models answer the training prompts: pass rates, which answers become traces, and the cards of the stages
`difficulty` and `sample`.

    rates = [PassRate("a1", outcomes={"correct": 3, "wrong": 5}, num_tokens=312, num_truncated=0), ...]
    fits = [fit_of(rate, config) for rate in rates]         # which prompts are kept for RL
    write_pass_rates(path, rates, fits)
    traces = kept_traces(right, KeepAnswers(choose="diverse", max_per_prompt=4))

Only correct answers that ended by themselves are kept: a trace teaches where to stop. An answer with undecodable bytes
(U+FFFD) is not kept either: SFT would teach the policy to write that character. Where answers differ only in
whitespace, the first is kept. The choice for a smaller `max_per_prompt` is a prefix of the choice for a larger one.
"""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import TypeAdapter

from luffy.config.answers import DifficultyConfig, KeepAnswers, SampleConfig
from luffy.data.overlap import Hashes, word_triples
from luffy.files import replacing
from luffy.types import Outcome, Prompt, Trace

RATES_FILE, CARD_FILE = "pass_rates.parquet", "card.json"
_COLUMNS = {
    "uid": pa.string(),
    "num_samples": pa.int32(),
    "num_correct": pa.int32(),
    "mean_tokens": pa.float64(),
    "num_truncated": pa.int32(),
    "fit": pa.string(),
}


class Fit(StrEnum):
    """Whether a prompt is kept for RL."""

    KEPT = "kept"
    TOO_HARD = "too_hard"
    TOO_EASY = "too_easy"


@dataclass(frozen=True, slots=True)
class PassRate:
    """A policy's graded responses to one prompt."""

    uid: str
    outcomes: Mapping[str, int]
    """Number of responses by grading outcome; outcomes that never occurred are left out."""
    num_tokens: int
    """Tokens in all responses, stop tokens included."""
    num_truncated: int
    """Responses that ran into the length limit."""

    @property
    def num_samples(self) -> int:
        return sum(self.outcomes.values())

    @property
    def num_correct(self) -> int:
        return self.outcomes.get(Outcome.CORRECT, 0)

    @property
    def value(self) -> float:
        return self.num_correct / self.num_samples


@dataclass(frozen=True, slots=True)
class RateSummary:
    """Summary statistics of the pass rates of all training prompts."""

    prompts: int
    num_samples: int
    histogram: Mapping[str, int]
    """Prompts by the number of their correct responses, from 0 to `num_samples`."""
    mean_pass_rate: float
    ever_solved_share: float
    """Share of prompts with at least one correct response (pass@`num_samples`)."""
    mean_tokens: float
    truncated_share: float
    """Share of responses that ran into the length limit: longer ones might have been correct."""
    outcomes: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class DifficultyCard:
    """All of `card.json`."""

    policy: str
    temperature: float
    max_response_tokens: int
    min_pass_rate: float
    max_pass_rate: float
    fits: Mapping[str, int]
    """Number of prompts that are kept, too hard and too easy."""
    rates: RateSummary
    sources: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """For each `data_source`: prompts, those that stay, and the mean pass rate."""


def summarise_rates(rates: Sequence[PassRate], num_samples: int) -> RateSummary:
    """The summary of all prompts, each with `num_samples` responses."""
    outcomes: Counter[str] = Counter()
    for rate in rates:
        outcomes.update(rate.outcomes)
    correct = Counter(rate.num_correct for rate in rates)
    return RateSummary(
        prompts=len(rates),
        num_samples=num_samples,
        histogram={str(number): correct[number] for number in range(num_samples + 1)},
        mean_pass_rate=_mean([rate.value for rate in rates]),
        ever_solved_share=_mean([float(rate.num_correct > 0) for rate in rates]),
        mean_tokens=sum(rate.num_tokens for rate in rates) / outcomes.total(),
        truncated_share=sum(rate.num_truncated for rate in rates) / outcomes.total(),
        outcomes={outcome.value: outcomes[outcome.value] for outcome in Outcome},
    )


def fit_of(rate: PassRate, config: DifficultyConfig) -> Fit:
    """Return whether a prompt is within the bounds (inclusive), too hard or too easy."""
    if rate.value < config.min_pass_rate:
        return Fit.TOO_HARD
    return Fit.TOO_EASY if rate.value > config.max_pass_rate else Fit.KEPT


def write_pass_rates(path: Path, rates: Sequence[PassRate], fits: Sequence[Fit] = ()) -> None:
    """Write one row per prompt, atomically; without `fits`, the column `fit` is left out."""
    columns: dict[str, object] = {
        "uid": [rate.uid for rate in rates],
        "num_samples": [rate.num_samples for rate in rates],
        "num_correct": [rate.num_correct for rate in rates],
        "mean_tokens": [rate.num_tokens / rate.num_samples for rate in rates],
        "num_truncated": [rate.num_truncated for rate in rates],
        **({"fit": fits} if fits else {}),
    }
    schema = pa.schema([pa.field(name, _COLUMNS[name], nullable=False) for name in columns])
    with replacing(path) as file:
        pq.write_table(pa.Table.from_pydict(columns, schema), file, compression="zstd")


def read_pass_rates(path: Path) -> dict[str, float]:
    """Return the pass rate of each prompt by uid; empty without such a file."""
    if not path.exists():
        return {}
    rows = pq.read_table(path, columns=["uid", "num_samples", "num_correct"]).to_pylist()
    return {row["uid"]: row["num_correct"] / row["num_samples"] for row in rows}


def difficulty_card(
    policy: str, config: DifficultyConfig, rates: Sequence[PassRate], fits: Sequence[Fit], data_sources: Sequence[str]
) -> DifficultyCard:
    """Return the card of all prompts as the node `policy` solves them; every setting of `config` that has a fallback
    must be filled in."""
    assert config.temperature is not None
    assert config.max_response_tokens is not None
    sources = {}
    for source in sorted(set(data_sources)):
        chosen = [(rate, fit) for rate, fit, of in zip(rates, fits, data_sources, strict=True) if of == source]
        sources[source] = {
            "prompts": len(chosen),
            "kept": sum(fit is Fit.KEPT for _, fit in chosen),
            "mean_pass_rate": _mean([rate.value for rate, _ in chosen]),
        }
    return DifficultyCard(
        policy=policy,
        temperature=config.temperature,
        max_response_tokens=config.max_response_tokens,
        min_pass_rate=config.min_pass_rate,
        max_pass_rate=config.max_pass_rate,
        fits={str(fit): fits.count(fit) for fit in Fit},
        rates=summarise_rates(rates, config.num_samples),
        sources=sources,
    )


@dataclass(slots=True)
class KeptCount:
    """Number of kept traces, and of prompts with one; counted while the prompts are iterated over."""

    prompts: int = 0
    traces: int = 0
    mean_tokens: float = 0.0
    """Mean length of a trace."""
    with_logprobs: int = 0
    """Traces whose text is tokenized into the same tokens that were sampled."""

    def passing(self, prompts: Iterable[Prompt]) -> Iterable[Prompt]:
        """`prompts`, all of them counted once the last one was yielded."""
        num_tokens = 0
        for prompt in prompts:
            self.prompts += 1
            self.traces += len(prompt.traces)
            num_tokens += sum(trace.num_tokens or 0 for trace in prompt.traces)
            self.with_logprobs += sum(trace.logprobs is not None for trace in prompt.traces)
            yield prompt
        self.mean_tokens = num_tokens / self.traces if self.traces else 0.0


@dataclass(frozen=True, slots=True)
class SampleCard:
    """All of `card.json`."""

    policy: str
    """Node of the policy that was sampled."""
    round: int
    temperature: float
    max_response_tokens: int
    choose: str
    max_per_prompt: int
    rates: RateSummary
    kept: KeptCount


def sample_card(policy: str, number: int, config: SampleConfig, rates: RateSummary, kept: KeptCount) -> SampleCard:
    """The card of round `number`; every setting of `config` that has a fallback must be filled in."""
    assert config.max_response_tokens is not None
    return SampleCard(
        policy=policy,
        round=number,
        temperature=config.temperature,
        max_response_tokens=config.max_response_tokens,
        choose=config.keep.choose,
        max_per_prompt=config.keep.max_per_prompt,
        rates=rates,
        kept=kept,
    )


@dataclass(slots=True)
class TeacherCard:
    """One teacher's part, counted while its answers come."""

    model: str
    decoding: str
    max_response_tokens: int
    prompts: int
    """Intended for it; `questions` were sent to it."""
    questions: int = 0
    answers: int = 0
    """Answers with text or without, of any length; not those that failed."""
    correct: int = 0
    solved: int = 0
    """Prompts with a correct answer."""
    outcomes: dict[str, int] = field(default_factory=dict)
    rejected: dict[str, int] = field(default_factory=dict)
    """Correct answers that are no traces, by reason."""
    traces: int = 0
    with_logprobs: int = 0
    """Traces with the teacher's log-probabilities."""
    prompt_tokens: int = 0
    num_tokens: int = 0
    cost: float | None = None
    """None: the teacher has no price."""
    not_asked: int = 0
    """Questions that the budget did not allow, at most."""

    @property
    def pass_rate(self) -> float:
        """Correct answers among all answers; 0 without any."""
        return self.correct / self.answers if self.answers else 0.0


@dataclass(frozen=True, slots=True)
class TaughtCard:
    """All of `card.json` of a stage that teachers answered."""

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


Card = TypeVar("Card", DifficultyCard, SampleCard, TaughtCard)


def card_json(card: Card) -> str:
    """The contents of `card.json`."""
    return json.dumps(asdict(card), indent=2, ensure_ascii=False) + "\n"


def read_card(path: Path, kind: type[Card]) -> Card:
    """The card of that kind in a `card.json`."""
    return TypeAdapter(kind).validate_json(path.read_bytes())


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


_UNDECODED = "\ufffd"


def is_text(answer: str) -> bool:
    """Whether the answer has text, without undecodable bytes."""
    return bool(answer.strip()) and _UNDECODED not in answer


def kept_traces(answers: Sequence[Trace], rule: KeepAnswers) -> tuple[Trace, ...]:
    """The traces that `rule` keeps, in the order of choice.

    `answers` are those that may be kept, in the order of sampling.
    """
    first: dict[str, Trace] = {}
    for answer in answers:
        first.setdefault(" ".join(answer.text.split()), answer)
    traces = list(first.values())
    if rule.choose == "shortest":
        traces.sort(key=lambda trace: trace.num_tokens or 0)  # stable: ties stay in the order of sampling
    if rule.choose == "diverse":
        traces = [traces[place] for place in farthest_first([trace.text for trace in traces], rule.max_per_prompt)]
    return tuple(traces[: rule.max_per_prompt])


def farthest_first(texts: Sequence[str], count: int) -> list[int]:
    """Indices of `count` texts: the first, then always the one whose nearest chosen text is farthest away.

    Farthest-first traversal (Gonzalez 1985), which is within a factor of two of the largest possible least distance.
    The distance is Jaccard's over the sets of word triples, without case and punctuation. Ties go to the earlier text.
    """
    runs = [word_triples(text) for text in texts]
    nearest = [np.inf] * len(runs)  # distance of each text from those chosen
    chosen: list[int] = []
    while len(chosen) < min(count, len(runs)):
        found = max((index for index in range(len(runs)) if index not in chosen), key=lambda index: nearest[index])
        chosen.append(found)
        nearest = [min(before, _distance(own, runs[found])) for before, own in zip(nearest, runs, strict=True)]
    return chosen


def _distance(one: Hashes, other: Hashes) -> float:
    shared = len(np.intersect1d(one, other, assume_unique=True))
    union = len(one) + len(other) - shared
    return 1 - shared / union if union else 0.0

"""What a paper's formula looks at: one response at a time, nothing padded or packed, in float64."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn

from luffy.types import Source

LENGTH_LIMIT = 12
"""Of a response, in tokens: the constant of Dr.GRPO."""


STEP, TOTAL_STEPS = 3, 10
"""The step that is tested: schedules are in motion."""
PROGRESS = (STEP - 1) / (TOTAL_STEPS - 1)

NUM_CHOICES = 5
"""Tokens of the vocabulary that divergences compare one by one: fewer than there are, as with a preset's own number."""


def _empty() -> Tensor:
    return torch.zeros(0, dtype=torch.float64)


class Text(Protocol):
    """A response to a prompt: all that the model is asked."""

    @property
    def prompt_ids(self) -> Sequence[int]: ...
    @property
    def response_ids(self) -> Sequence[int]: ...
    @property
    def source(self) -> Sequence[Source]: ...
    @property
    def context_starts(self) -> Sequence[int]: ...


def learned_places(text: Text) -> list[int]:
    """Of the response: all but the tokens of an environment, which no formula sees."""
    return [place for place in range(len(text.response_ids)) if text.source[place] is not Source.ENVIRONMENT]


@dataclass(frozen=True)
class ReferenceRow:
    """One response; every tensor has an entry for each of its learned tokens."""

    prompt_ids: Sequence[int]
    response_ids: Sequence[int]
    source: Sequence[Source]
    given: Tensor
    """bool: not written by the policy in this step, but by a demonstration's author or by the policy of an earlier."""
    advantage: Tensor
    logp_old: Tensor
    logp_sampler: Tensor = field(default_factory=_empty)
    """Under the policy that sampled the token; NaN where unknown."""
    logp_start: Tensor = field(default_factory=_empty)
    """Under the frozen policy that the stage started from."""
    logp_teacher: Tensor = field(default_factory=_empty)
    """Under the teacher of a distillation."""
    teacher_all: Tensor = field(default_factory=_empty)
    """`(T, V)` the teacher's log-probabilities of every token of the vocabulary."""
    taught_by: int = -1
    """Number of its teacher; -1: it has none."""
    value: Tensor = field(default_factory=_empty)
    """The critic's value of the state before each token."""
    group: int = 0
    reward: float = 0.0
    is_truncated: bool = False
    context_starts: Sequence[int] = ()
    """Places from which the model sees nothing of what was before: neither the prompt nor earlier turns."""

    @property
    def is_rollout(self) -> bool:
        return not bool(self.given.any())


@dataclass(frozen=True)
class Evaluated:
    """A row under the present weights."""

    row: ReferenceRow
    logp: Tensor
    """At the temperature of the rollouts, as is `entropy`."""
    entropy: Tensor
    untempered_logp: Tensor
    """At temperature 1, as is `untempered_entropy`: what supervised learning is about."""
    untempered_entropy: Tensor
    logp_all: Tensor
    """`(T, V)` of every token of the vocabulary, at the temperature of the rollouts."""

    @property
    def given(self) -> Tensor:
        return self.row.given

    @property
    def own(self) -> Tensor:
        return ~self.row.given


@dataclass(frozen=True)
class Reference:
    """A method, written from its paper."""

    rows: str
    """Kind of rows that its groups have: see `reference.gradient_case.trajectories`."""
    advantages: Callable[[Sequence[ReferenceRow]], Sequence[Tensor]]
    """Of all rows of the RL step, for each of their tokens."""
    loss: Callable[[Sequence[Evaluated]], Tensor]
    """Of the whole optimizer step."""

    def __call__(self, rows: Sequence[Evaluated]) -> Tensor:
        return self.loss(rows)


def evaluate(model: nn.Module, text: Text, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Log-probability and entropy at each learned token of the response."""
    return _scores(_logits(model, text), text, temperature)


def forward(model: nn.Module, row: ReferenceRow, temperature: float = 1.0) -> Evaluated:
    """A row under a policy whose rollouts are sampled at `temperature`."""
    logits = _logits(model, row)
    logp_all = _distributions(logits, row, temperature)
    return Evaluated(row, *_scores(logits, row, temperature), *_scores(logits, row, 1.0), logp_all)


def evaluate_all(model: nn.Module, text: Text) -> Tensor:
    """`(T, V)` log-probabilities of every token of the vocabulary at each learned token of the response."""
    return _distributions(_logits(model, text), text, 1.0)


def _logits(model: nn.Module, text: Text) -> Tensor:
    """Those that predict each token of the response; of the first token of a new context, which nothing predicts, 0."""
    starts, ends = (0, *text.context_starts), (*text.context_starts, len(text.response_ids))
    parts = []
    for start, end in zip(starts, ends, strict=True):
        before = () if start else text.prompt_ids
        ids = torch.tensor([[*before, *text.response_ids[start:end]]])
        logits = model(input_ids=ids, use_cache=False).logits[0].double()[:-1]
        parts.append(torch.cat([torch.zeros_like(logits[:1]), logits]) if start else logits[len(before) - 1 :])
    return torch.cat(parts)


def _scores(logits: Tensor, text: Text, temperature: float) -> tuple[Tensor, Tensor]:
    places, logp_all = learned_places(text), _distributions(logits, text, temperature)
    logp = logp_all[torch.arange(len(places)), torch.tensor(text.response_ids)[places]]
    return logp, -(logp_all.exp() * logp_all).sum(-1)


def _distributions(logits: Tensor, text: Text, temperature: float) -> Tensor:
    return torch.log_softmax(logits[learned_places(text)] / temperature, dim=-1)


def joined(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(parts)) if parts else _empty()


def total(parts: Sequence[Tensor]) -> Tensor:
    return joined(parts).sum()


def mean(parts: Sequence[Tensor]) -> Tensor:
    """Over all tokens; 0 without any."""
    tokens = joined(parts)
    return tokens.sum() / max(len(tokens), 1)

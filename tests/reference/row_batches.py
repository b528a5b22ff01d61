"""Batches of rows laid out by hand: a prompt token, then the response; and the whole loss over them."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from luffy.config.terms import TermConfig
from luffy.objectives.losses import TokenBatch
from luffy.objectives.schedules import StepObjective, objective_at
from luffy.types import TrainBatch


@dataclass(frozen=True)
class Row:
    """One response."""

    length: int
    guided: int = 0
    """How many of its first tokens are off-policy."""
    correct: bool = False
    accuracy: float = 0.0
    """Of its group."""


def demonstration(length: int, **settings: float) -> Row:
    return Row(length, guided=length, **settings)


def row_batch(rows: Sequence[Row], advantage: float = 1.0) -> TrainBatch:
    """Prompts of one token; `logp_old` and the reference are 0, the sampler is unknown."""
    width = 1 + max((row.length for row in rows), default=0)
    position = torch.arange(width).expand(len(rows), width)

    def column(name: str) -> Tensor:
        return torch.tensor([getattr(row, name) for row in rows]).reshape(-1, 1)

    response = (position >= 1) & (position <= column("length"))
    zeros = torch.zeros(len(rows), width)
    return TrainBatch(
        input_ids_BT=torch.ones(len(rows), width, dtype=torch.long),
        attention_mask_BT=position <= column("length"),
        position_ids_BT=position,
        response_mask_BT=response,
        is_off_policy_BT=response & (position <= column("guided")),
        advantage_BT=zeros + advantage,
        logp_old_BT=zeros,
        logp_behavior_BT=zeros + torch.nan,
        logp_ref_BT=zeros,
        logp_teacher_BT=zeros,
        choice_BTC=torch.zeros((*zeros.shape, 1), dtype=torch.int32),
        logq_BTC=torch.full((*zeros.shape, 2), -0.7),
        is_taught_BT=torch.zeros_like(response),
        value_old_BT=zeros,
        return_BT=zeros,
        sequence_BT=torch.arange(len(rows)).unsqueeze(-1).repeat(1, width),
        episode_BT=torch.arange(len(rows)).unsqueeze(-1).repeat(1, width),
        is_correct_BT=column("correct").bool().repeat(1, width),
        group_accuracy_BT=zeros + column("accuracy").float(),
    )


def tokens_of(
    batch: TrainBatch, logp_BT: Tensor, entropy_BT: Tensor | None = None, logp_BTC: Tensor | None = None
) -> TokenBatch:
    """What the losses see of a batch under the given log-probabilities, at temperature 1."""
    entropy_BT = torch.ones_like(logp_BT) if entropy_BT is None else entropy_BT
    return TokenBatch(
        logp_BT=logp_BT,
        entropy_BT=entropy_BT,
        untempered_logp_BT=logp_BT,
        untempered_entropy_BT=entropy_BT,
        logp_old_BT=batch.logp_old_BT,
        logp_behavior_BT=batch.logp_behavior_BT,
        logp_ref_BT=batch.logp_ref_BT,
        logp_teacher_BT=batch.logp_teacher_BT,
        logp_BTC=torch.stack([logp_BT, logp_BT], dim=-1) if logp_BTC is None else logp_BTC,
        logq_BTC=batch.logq_BTC,
        advantage_BT=batch.advantage_BT,
        sequence_BT=batch.sequence_BT,
        selected_BT=batch.response_mask_BT,
    )


def objective_of(*terms: TermConfig, max_response_tokens: int = 10) -> StepObjective:
    """The terms at the first step of a stage."""
    return objective_at(terms, step=1, total_steps=1, max_response_tokens=max_response_tokens)


def alone(tensor: Tensor) -> Tensor:
    """The sum over ranks where there is one."""
    return tensor

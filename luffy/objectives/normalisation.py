"""Token weights of the terms: which tokens are selected, and what their sum is divided by.

A term is a sum over its tokens divided by a denominator that is counted once over the *whole optimizer step*: all
micro-batches, all ranks. So every token has one weight, fixed before the first forward pass, and the split of the step
into micro-batches cannot change the gradient.

Shape legend: `K` terms, `B` rows, `T` tokens.
"""

from collections.abc import Callable, Sequence
from functools import reduce

import torch
from torch import Tensor

from luffy.config.terms import GateConfig, Selector, TermConfig
from luffy.objectives.ratios import sequence_sum
from luffy.objectives.schedules import StepObjective
from luffy.types import TrainBatch

SumOverRanks = Callable[[Tensor], Tensor]
"""Gives the sum of a tensor over all data-parallel ranks, the same on each."""


def select(batch: TrainBatch, selector: Selector) -> Tensor:
    """`(B, T)` bool: the response tokens that a term looks at."""
    if selector == "response":
        return batch.response_mask_BT
    wanted_BT = batch.is_off_policy_BT if selector == "off_policy" else ~batch.is_off_policy_BT
    return batch.response_mask_BT & wanted_BT


def passes(batch: TrainBatch, gate: GateConfig | None) -> Tensor:
    """`(B, T)` bool: the rows that pass a gate."""
    open_BT = torch.ones_like(batch.response_mask_BT)
    if gate is None:
        return open_BT
    if gate.group_accuracy_above is not None:
        open_BT = open_BT & (batch.group_accuracy_BT > gate.group_accuracy_above)
    if gate.group_accuracy_at_most is not None:
        open_BT = open_BT & (batch.group_accuracy_BT <= gate.group_accuracy_at_most)
    if gate.outcome is not None:
        open_BT = open_BT & (batch.is_correct_BT == (gate.outcome == "correct"))
    return open_BT


def token_weights(objective: StepObjective, batch: TrainBatch, sum_over_ranks: SumOverRanks) -> Tensor:
    """`(K, B, T)` float64: coefficient / denominator on each term's tokens, 0 elsewhere.

    `batch` is this rank's share of the optimizer step. The loss of the step is the sum over ranks, terms and tokens of
    weight x token loss. A term without a token anywhere gets weight 0, never NaN.
    """
    terms = objective.terms
    if not terms:
        return torch.zeros(0, *batch.input_ids_BT.shape, dtype=torch.float64)
    share_KBT = torch.zeros(len(terms), *batch.input_ids_BT.shape, dtype=torch.float64)
    denominator_K = torch.zeros(len(terms), dtype=torch.float64)
    for k, term in enumerate(terms):
        counted_BT = _counted(term, terms, batch)
        denominator_K[k] = _denominator(counted_BT, batch.episode_BT, term, objective.max_response_tokens)
        share_KBT[k] = (select(batch, term.select) & passes(batch, term.gate)).double()
        if term.normaliser.mode == "sequence":
            share_KBT[k] /= sequence_sum(counted_BT.double(), batch.episode_BT).clamp(min=1)
    denominator_K = sum_over_ranks(denominator_K)
    coefficient_K = torch.tensor(objective.coefficients, dtype=torch.float64)
    scale_K = torch.where(denominator_K > 0, coefficient_K / denominator_K.clamp(min=1), 0.0)
    return share_KBT * scale_K[:, None, None]


def _counted(term: TermConfig, terms: Sequence[TermConfig], batch: TrainBatch) -> Tensor:
    """`(B, T)` bool: the tokens that a term's denominator counts."""
    if term.normaliser.population == "all":
        return batch.response_mask_BT
    joint = term.normaliser.population == "joint"
    members = [other for other in terms if other.is_policy_gradient] if joint else [term]
    gated = not term.normaliser.before_gate
    masks = [
        select(batch, member.select) & passes(batch, member.gate) if gated else select(batch, member.select)
        for member in members
    ]
    return reduce(torch.logical_or, masks)


def _denominator(counted_BT: Tensor, episode_BT: Tensor, term: TermConfig, max_response_tokens: int) -> Tensor:
    if term.normaliser.mode == "token":
        return counted_BT.sum().double()
    # An episode with several contexts is several rows, and one response.
    num_responses = episode_BT[counted_BT].unique().numel()
    per_response = max_response_tokens if term.normaliser.mode == "constant" else 1
    return torch.tensor(num_responses * per_response, dtype=torch.float64)

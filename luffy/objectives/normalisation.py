"""From terms to token weights: who is selected, divided by what.

A term is a sum over its tokens divided by a denominator that is counted once over the *whole optimizer step*: all
micro-batches, all ranks. So every token has one weight, fixed before the first forward pass, and how the step is cut
into micro-batches cannot change the gradient.

Shape legend: `K` terms, `B` rows, `T` tokens.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from luffy.config.objective import Selector, TermConfig
from luffy.types import TrainBatch

SumOverRanks = Callable[[Tensor], Tensor]
"""Adds a tensor over all data-parallel ranks."""


def select(batch: TrainBatch, selector: Selector) -> Tensor:
    """`(B, T)` bool: the response tokens that a term looks at."""
    if selector == "response":
        return batch.response_mask_BT
    wanted_BT = batch.is_off_policy_BT if selector == "off_policy" else ~batch.is_off_policy_BT
    return batch.response_mask_BT & wanted_BT


def token_weights(
    terms: Sequence[TermConfig], batch: TrainBatch, max_response_tokens: int, sum_over_ranks: SumOverRanks
) -> Tensor:
    """`(K, B, T)` float64: coefficient / denominator on each term's tokens, 0 elsewhere.

    `batch` is this rank's share of the optimizer step. The loss of the step is the sum over ranks, terms and tokens of
    weight x token loss. A term without a token anywhere gets weight 0, never NaN.
    """
    if not terms:
        return torch.zeros(0, *batch.input_ids_BT.shape, dtype=torch.float64)
    mask_KBT = torch.stack([select(batch, term.select) for term in terms])
    joint_BT = _union([mask for mask, term in zip(mask_KBT, terms, strict=True) if term.is_policy_gradient], batch)
    population_KBT = torch.stack(
        [
            joint_BT if term.normaliser.population == "joint" else mask
            for mask, term in zip(mask_KBT, terms, strict=True)
        ]
    )
    share_KBT = mask_KBT.double()
    denominator_K = torch.zeros(len(terms), dtype=torch.float64)
    for k, term in enumerate(terms):
        length_B = population_KBT[k].sum(dim=-1).double()
        num_sequences = (length_B > 0).sum().double()
        if term.normaliser.mode == "token":
            denominator_K[k] = length_B.sum()
        elif term.normaliser.mode == "sequence":
            denominator_K[k] = num_sequences
            share_KBT[k] /= length_B.clamp(min=1).unsqueeze(-1)
        else:
            denominator_K[k] = num_sequences * max_response_tokens
    denominator_K = sum_over_ranks(denominator_K)
    coefficient_K = torch.tensor([term.coefficient for term in terms], dtype=torch.float64)
    scale_K = torch.where(denominator_K > 0, coefficient_K / denominator_K.clamp(min=1), 0.0)
    return share_KBT * scale_K[:, None, None]


def _union(masks: Sequence[Tensor], batch: TrainBatch) -> Tensor:
    union_BT = torch.zeros_like(batch.response_mask_BT)
    for mask_BT in masks:
        union_BT = union_BT | mask_BT
    return union_BT

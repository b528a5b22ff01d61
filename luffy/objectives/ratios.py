"""Importance ratios that stay finite, and sums over the sequences of a micro-batch.

Shape legend: `B` rows, `T` tokens; a packed row holds several sequences.
"""

import torch
from torch import Tensor

_MAX_LOG_RATIO = 20.0
"""A ratio above e^20 means that two models disagree beyond use; its gradient is 0 instead of an overflow."""


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """exp(log_ratio), constant above e^20."""
    return log_ratio.clamp(max=_MAX_LOG_RATIO).exp()


def sequence_sum(value_BT: Tensor, sequence_BT: Tensor) -> Tensor:
    """`(B, T)`: at each token, the sum of `value_BT` over the tokens of its sequence.

    Micro-batches never cut a sequence, so the sum is whole whatever they are.
    """
    _, index_BT = sequence_BT.unique(return_inverse=True)
    size = int(index_BT.max()) + 1 if index_BT.numel() else 0
    total_S = value_BT.new_zeros(size).index_add(0, index_BT.flatten(), value_BT.flatten())
    return total_S[index_BT]


def sequence_mean(value_BT: Tensor, selected_BT: Tensor, sequence_BT: Tensor) -> Tensor:
    """`(B, T)`: at each token, the mean of `value_BT` over the selected tokens of its sequence; 0 without any."""
    count_BT = sequence_sum(selected_BT.to(value_BT.dtype), sequence_BT)
    return sequence_sum(torch.where(selected_BT, value_BT, 0.0), sequence_BT) / count_BT.clamp(min=1)

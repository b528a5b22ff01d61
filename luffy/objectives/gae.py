"""Advantages of single tokens from a critic's values: GAE (arXiv 1506.02438, eq. 16).

Shape legend: `B` rows, `T` tokens.
"""

import torch
from torch import Tensor

from luffy.config.group import GeneralizedAdvantage
from luffy.objectives.normalisation import SumOverRanks

_EPS = 1e-8


def generalized_advantages(
    reward_B: Tensor, value_BT: Tensor, mask_BT: Tensor, config: GeneralizedAdvantage
) -> tuple[Tensor, Tensor]:
    """`(B, T)` float64 advantages and returns (the critic's targets), 0 outside `mask_BT`.

    Args:
        reward_B: reward of the whole response; it falls on the last token.
        value_BT: value of the state before each token.
        mask_BT: response tokens. Tokens of an environment between them are not states of their own: the state after
            the last token of a turn is the one before the first token of the next.

    A row without a response token has 0 everywhere.
    """
    mask = mask_BT.double()
    value = value_BT.double() * mask
    num_left_BT = mask.flip(1).cumsum(dim=1).flip(1)
    last_BT = mask * (num_left_BT == 1)
    reward_BT = last_BT * reward_B.double().unsqueeze(-1)
    advantage_BT = torch.zeros_like(value)
    next_value_B = next_advantage_B = torch.zeros_like(reward_B, dtype=torch.float64)
    for t in reversed(range(value.shape[1])):
        delta_B = reward_BT[:, t] + config.gamma * next_value_B - value[:, t]
        step_B = mask_BT[:, t]
        next_advantage_B = torch.where(step_B, delta_B + config.gamma * config.lam * next_advantage_B, next_advantage_B)
        next_value_B = torch.where(step_B, value[:, t], next_value_B)
        advantage_BT[:, t] = next_advantage_B * step_B
    return advantage_BT, (advantage_BT + value) * mask


def whiten(advantage_BT: Tensor, mask_BT: Tensor, sum_over_ranks: SumOverRanks) -> Tensor:
    """Mean 0 and (unbiased) standard deviation 1 over the masked tokens of all ranks; 0 elsewhere.

    Advantages that are all equal become 0.
    """
    mask = mask_BT.double()
    count, total = sum_over_ranks(torch.stack([mask.sum(), (advantage_BT * mask).sum()]))
    centred_BT = (advantage_BT - total / count.clamp(min=1)) * mask
    (squares,) = sum_over_ranks(centred_BT.square().sum().unsqueeze(0))
    return centred_BT / ((squares / (count - 1).clamp(min=1)).sqrt() + _EPS)

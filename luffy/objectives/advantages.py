"""Group advantages (LUFFY eq. 4 without its standard deviation; GRPO with it).

Shape legend: `B` rows; every row belongs to one group.
"""

import torch
from torch import Tensor

from luffy.config.objective import AdvantageConfig

_EPS = 1e-6
"""Added to the standard deviation, as in GRPO's published code."""


def group_advantages(reward_B: Tensor, group_B: Tensor, is_off_policy_B: Tensor, config: AdvantageConfig) -> Tensor:
    """`(B,)` float64 advantages: A_i = R_i - mean(R over the population of i's group), optionally over its std.

    Args:
        reward_B: rewards.
        group_B: index of each row's group, from 0.
        is_off_policy_B: True for demonstrations. With `population: on_policy` they do not enter the baseline and
            get advantage 0.

    A group of one row has advantage 0 under `joint` (it is its own mean); a group whose rewards are all equal
    has exactly 0 everywhere, with and without the std.
    """
    reward_B = reward_B.double()
    counts_B = torch.ones_like(reward_B) if config.population == "joint" else (~is_off_policy_B).double()
    num_groups = int(group_B.max()) + 1 if len(group_B) else 0
    count_P = _group_sum(counts_B, group_B, num_groups).clamp(min=1)
    mean_P = _group_sum(reward_B * counts_B, group_B, num_groups) / count_P
    advantage_B = (reward_B - mean_P[group_B]) * counts_B
    spread_P = _group_max(advantage_B.abs(), group_B, num_groups)
    advantage_B = torch.where(spread_P[group_B] > 1e-12 * reward_B.abs().clamp(min=1), advantage_B, 0.0)
    if config.scale_by_std:
        variance_P = _group_sum(advantage_B.square(), group_B, num_groups) / (count_P - 1).clamp(min=1)
        advantage_B = advantage_B / (variance_P.sqrt()[group_B] + _EPS)
    return advantage_B


def _group_sum(value_B: Tensor, group_B: Tensor, num_groups: int) -> Tensor:
    return torch.zeros(num_groups, dtype=value_B.dtype).index_add_(0, group_B, value_B)


def _group_max(value_B: Tensor, group_B: Tensor, num_groups: int) -> Tensor:
    return torch.zeros(num_groups, dtype=value_B.dtype).scatter_reduce_(0, group_B, value_B, "amax")

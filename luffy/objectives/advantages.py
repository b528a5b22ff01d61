"""Advantages of whole rows, from the rewards of their groups.

Shape legend: `B` rows, each in one group; `P` groups.
"""

import math
from dataclasses import dataclass
from functools import singledispatch

import torch
from torch import Tensor

from luffy.config.group import (
    AdvantageConfig,
    GlobalBatchAdvantage,
    GroupAdvantage,
    GroupMeanAdvantage,
    LeaveOneOutAdvantage,
    LengthWeightedAdvantage,
    NoAdvantage,
    PassAtKAdvantage,
    RawAdvantage,
)

_EPS = 1e-6
"""Added to standard deviations, as in GRPO's published code."""
_ROUNDING = 1e-12
"""Differences of rewards below this share of the reward are rounding of the mean, not signal."""


@dataclass(frozen=True, slots=True)
class RowRewards:
    """Input of the advantage estimators; every tensor is `(B,)`."""

    reward_B: Tensor
    length_B: Tensor
    """Response tokens."""
    group_B: Tensor
    """Index of the row's group, from 0."""
    is_off_policy_B: Tensor
    """`Trajectory.is_off_policy` of each row."""


@dataclass(frozen=True, slots=True)
class _Population:
    """The rewards in float64, and the rows that the baseline is computed from."""

    reward_B: Tensor
    length_B: Tensor
    group_B: Tensor
    counts_B: Tensor
    """1 for rows of the population, 0 for those outside."""

    def sum(self, value_B: Tensor) -> Tensor:
        """`(B,)`: at each row, the sum over the population of its group."""
        num_groups = int(self.group_B.max()) + 1 if len(self.group_B) else 0
        total_P = value_B.new_zeros(num_groups).index_add_(0, self.group_B, value_B * self.counts_B)
        return total_P[self.group_B]

    def mean(self, weight_B: Tensor) -> Tensor:
        """`(B,)`: weighted mean reward of each row's group; 0 where all weights of the group are 0."""
        return self.sum(self.reward_B * weight_B) / self.sum(weight_B).clamp(min=1)

    def size(self) -> Tensor:
        """`(B,)`: number of rows in the population of each row's group."""
        return self.sum(torch.ones_like(self.reward_B))


def group_advantages(rows: RowRewards, config: AdvantageConfig) -> Tensor:
    """`(B,)` float64 advantages; rows outside the population have 0.

    A row alone in its population has advantage 0, except under `global_batch` without a group baseline, which compares
    with the whole batch. Rewards that are all equal give exactly 0 everywhere. Neither holds for `raw`, which has no
    baseline. GAE computes advantages per token (`luffy.objectives.gae`).
    """
    assert isinstance(config, GroupAdvantage), f"{config.kind} gives no advantages to whole rows"
    joint = config.population == "joint"
    reward_B = rows.reward_B.double()
    population = _Population(
        reward_B=reward_B,
        length_B=rows.length_B.double(),
        group_B=rows.group_B,
        counts_B=torch.ones_like(reward_B) if joint else (~rows.is_off_policy_B).double(),
    )
    return _estimate(config, population) * population.counts_B


@singledispatch
def _estimate(config: GroupAdvantage, population: _Population) -> Tensor:
    raise NotImplementedError(f"no estimator for {type(config).__name__}")


@_estimate.register
def _group_mean(config: GroupMeanAdvantage, population: _Population) -> Tensor:
    advantage_B = _centred(population, torch.ones_like(population.reward_B))
    if not config.scale_by_std:
        return advantage_B
    variance_B = population.sum(advantage_B.square()) / (population.size() - 1).clamp(min=1)
    return advantage_B / (variance_B.sqrt() + _EPS)


@_estimate.register
def _leave_one_out(config: LeaveOneOutAdvantage, population: _Population) -> Tensor:
    """(R_i - mean) n / (n - 1), which is R_i - mean of the others."""
    size_B = population.size()
    return _centred(population, torch.ones_like(size_B)) * size_B / (size_B - 1).clamp(min=1)


@_estimate.register
def _length_weighted(config: LengthWeightedAdvantage, population: _Population) -> Tensor:
    return _centred(population, population.length_B)


@_estimate.register
def _pass_at_k(config: PassAtKAdvantage, population: _Population) -> Tensor:
    """Arithmetic of arXiv 2508.10751, section 2.4: the advantage of a row, averaged over the subsets it is in.

    A subset of k rows earns 1 when any of them is right. With w wrong rows of n, its mean over subsets is
    1 - C(w, k) / C(n, k), its standard deviation that of a coin of this mean.
    """
    k = config.k
    right_B = (population.reward_B > 0).double()
    n_B, w_B = population.size(), population.sum(1 - right_B)
    mean_B = 1 - torch.tensor([_choose(w, k) / max(_choose(n, k), 1) for w, n in _pairs(w_B, n_B)], dtype=torch.float64)
    std_B = (mean_B * (1 - mean_B)).sqrt()
    # Probability that the other k - 1 rows of a wrong row's subset are all wrong.
    fails_B = torch.tensor(
        [_choose(w - 1, k - 1) / max(_choose(n - 1, k - 1), 1) for w, n in _pairs(w_B, n_B)], dtype=torch.float64
    )
    earned_B = torch.where(right_B > 0, 1.0, 1 - fails_B)
    return torch.where(std_B > 0, (earned_B - mean_B) / std_B.clamp(min=_EPS), 0.0)


@_estimate.register
def _global_batch(config: GlobalBatchAdvantage, population: _Population) -> Tensor:
    """Mean and (unbiased) deviation over the tokens of the RL step: a row counts once for each token."""
    value_B = population.reward_B
    if config.group_baseline:
        value_B = _centred(population, torch.ones_like(value_B))
    weight_B = population.length_B * population.counts_B
    count = weight_B.sum()
    mean = (weight_B * value_B).sum() / count.clamp(min=1)
    centred_B = value_B - mean
    std = ((weight_B * centred_B.square()).sum() / (count - 1).clamp(min=1)).sqrt()
    # Deviations this small relative to the mean are rounding errors: all rewards are equal.
    scale = mean.abs().clamp(min=1)
    return centred_B / (std + _EPS) if std > _ROUNDING * scale else torch.zeros_like(centred_B)


@_estimate.register
def _raw(config: RawAdvantage, population: _Population) -> Tensor:
    return population.reward_B


@_estimate.register
def _none(config: NoAdvantage, population: _Population) -> Tensor:
    return torch.zeros_like(population.reward_B)


def _centred(population: _Population, weight_B: Tensor) -> Tensor:
    """R_i - weighted mean of its group; exactly 0 where all rewards of the group are equal."""
    advantage_B = population.reward_B - population.mean(weight_B)
    scale_B = population.reward_B.abs().clamp(min=1)
    signal_B = population.sum((advantage_B.abs() > _ROUNDING * scale_B).double())
    return torch.where(signal_B > 0, advantage_B, 0.0)


def _pairs(wrong_B: Tensor, size_B: Tensor) -> list[tuple[int, int]]:
    return list(zip(wrong_B.long().tolist(), size_B.long().tolist(), strict=True))


def _choose(n: int, k: int) -> int:
    return math.comb(n, k) if n >= 0 else 0

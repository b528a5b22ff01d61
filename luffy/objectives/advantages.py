"""Advantages of whole rows, from the rewards of their groups; of single tokens, from a critic's values.

Shape legend: `B` rows, each in one group; `T` tokens; `P` groups.
"""

import math
from dataclasses import dataclass
from functools import singledispatch

import torch
from torch import Tensor

from luffy.config.group import (
    AdvantageConfig,
    CustomAdvantage,
    GeneralizedAdvantage,
    GlobalBatchAdvantage,
    GroupAdvantage,
    GroupMeanAdvantage,
    LeaveOneOutAdvantage,
    LengthWeightedAdvantage,
    NoAdvantage,
    PassAtKAdvantage,
    RawAdvantage,
)
from luffy.objectives.custom import called
from luffy.objectives.objective import SumOverRanks

_EPS = 1e-6
"""Added to standard deviations, as in GRPO's published code."""
_WHITENING_EPS = 1e-8
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
    baseline, nor for the user's own, which raises ConfigError where it fails. GAE computes advantages per token
    (`generalized_advantages`).
    """
    assert isinstance(config, GroupAdvantage), f"{config.kind} gives no advantages to whole rows"
    if isinstance(config, CustomAdvantage):
        return called(config.function, "objective.advantage", rows, config.options, rows.reward_B.shape).double()
    joint = config.population == "joint"
    reward_B = rows.reward_B.double()
    population = _Population(
        reward_B=reward_B,
        length_B=rows.length_B.double(),
        group_B=rows.group_B,
        counts_B=torch.ones_like(reward_B) if joint else (~rows.is_off_policy_B).double(),
    )
    return _estimate(config, population) * population.counts_B


def check_advantages(config: AdvantageConfig) -> None:
    """Call an estimator of the user's own on a small group; ConfigError for one that cannot be used."""
    if isinstance(config, CustomAdvantage):
        zeros_B = torch.zeros(4, dtype=torch.long)
        group_advantages(RowRewards(zeros_B.double(), zeros_B + 1, zeros_B, zeros_B.bool()), config)


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


def generalized_advantages(
    reward_B: Tensor, value_BT: Tensor, mask_BT: Tensor, config: GeneralizedAdvantage
) -> tuple[Tensor, Tensor]:
    """GAE (arXiv 1506.02438, eq. 16): `(B, T)` float64 advantages and returns (the critic's targets), else 0.

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
    return centred_BT / ((squares / (count - 1).clamp(min=1)).sqrt() + _WHITENING_EPS)

"""Advantages of the papers, row by row in plain arithmetic; each returns an entry for each token of each row."""

from collections.abc import Callable, Sequence
from itertools import combinations

import torch
from torch import Tensor

from reference.rows import ReferenceRow

Rows = Sequence[ReferenceRow]
Estimator = Callable[[Rows], list[Tensor]]


def spread(row: ReferenceRow, value: float) -> Tensor:
    return torch.full((len(row.given),), value, dtype=torch.float64)


def _by_group(value: Callable[[ReferenceRow, Rows], float], among: Callable[[ReferenceRow], bool]) -> Estimator:
    """The estimator whose population are the rows of the group that are `among`; others get 0."""

    def estimate(rows: Rows) -> list[Tensor]:
        found = []
        for row in rows:
            population = [other for other in rows if other.group == row.group and among(other)]
            found.append(spread(row, value(row, population) if among(row) else 0.0))
        return found

    return estimate


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _std(values: Sequence[float]) -> float:
    """Unbiased; 0 for a value alone."""
    centre = _mean(values)
    return (sum((value - centre) ** 2 for value in values) / max(len(values) - 1, 1)) ** 0.5


def _rewards(rows: Rows) -> list[float]:
    return [row.reward for row in rows]


def _centred(row: ReferenceRow, population: Rows) -> float:
    return row.reward - _mean(_rewards(population))


def _standardised(row: ReferenceRow, population: Rows) -> float:
    return _centred(row, population) / (_std(_rewards(population)) + 1e-6)


def _leave_one_out(row: ReferenceRow, population: Rows) -> float:
    others = [other.reward for other in population if other is not row]
    return row.reward - _mean(others) if others else 0.0


def _length_weighted(row: ReferenceRow, population: Rows) -> float:
    lengths = [len(other.given) for other in population]
    baseline = sum(n * other.reward for n, other in zip(lengths, population, strict=True)) / sum(lengths)
    return row.reward - baseline


def best_of(k: int) -> Callable[[ReferenceRow, Rows], float]:
    """Pass@k (arXiv 2508.10751) by enumeration: each subset of k rows earns the best of its rewards."""

    def value(row: ReferenceRow, population: Rows) -> float:
        subsets = list(combinations(range(len(population)), k))
        earned = {subset: max(population[i].reward for i in subset) for subset in subsets}
        centre = _mean(list(earned.values()))
        deviation = (centre * (1 - centre)) ** 0.5
        me = next(i for i, other in enumerate(population) if other is row)
        mine = _mean([earned[subset] for subset in subsets if me in subset])
        return (mine - centre) / deviation if deviation else 0.0

    return value


def everyone(row: ReferenceRow) -> bool:
    return True


def rollouts_only(row: ReferenceRow) -> bool:
    return row.is_rollout


centred = _by_group(_centred, everyone)
"""R - mean: Dr.GRPO; LUFFY, demonstrations counted."""
standardised = _by_group(_standardised, everyone)
"""GRPO."""
centred_rollouts = _by_group(_centred, rollouts_only)
standardised_rollouts = _by_group(_standardised, rollouts_only)
leave_one_out = _by_group(_leave_one_out, everyone)
length_weighted = _by_group(_length_weighted, everyone)
best_of_two = _by_group(best_of(2), everyone)


def raw(rows: Rows) -> list[Tensor]:
    """REINFORCE without a baseline: the row's own reward."""
    return [spread(row, row.reward) for row in rows]


def without_truncated(estimator: Estimator) -> Estimator:
    """DAPO's overlong filtering: rows cut at the limit count in the baseline and learn nothing."""

    def estimate(rows: Rows) -> list[Tensor]:
        values = estimator(rows)
        return [v * 0 if row.is_truncated else v for row, v in zip(rows, values, strict=True)]

    return estimate


def scaled(estimator: Estimator, own: float, given: float) -> Estimator:
    """LUFFY's `prefix_reward_weight_beta` and `_alpha`: by who wrote the token."""

    def estimate(rows: Rows) -> list[Tensor]:
        values = estimator(rows)
        return [v * torch.where(row.given, given, own) for row, v in zip(rows, values, strict=True)]

    return estimate


def reinforce_pp_baseline(rows: Rows) -> list[Tensor]:
    """R - mean of the group, then mean 0 and deviation 1 over all tokens of the RL step."""
    return _whitened(centred(rows), eps=1e-6)


def generalised(rows: Rows) -> list[Tensor]:
    """GAE (arXiv 1506.02438, eq. 16) with gamma 1, lambda 0.95 as the sum it is defined by, then whitened."""
    found = []
    for row in rows:
        n = len(row.given)
        after = [*row.value[1:].tolist(), 0.0]
        reward = [0.0] * (n - 1) + [row.reward]
        delta = [reward[t] + after[t] - float(row.value[t]) for t in range(n)]
        summed = [sum(0.95 ** (s - t) * delta[s] for s in range(t, n)) for t in range(n)]
        found.append(torch.tensor(summed, dtype=torch.float64))
    return _whitened(found, eps=1e-8)


def none(rows: Rows) -> list[Tensor]:
    """Supervised learning has no rewards."""
    return [spread(row, 0.0) for row in rows]


def _whitened(values: Sequence[Tensor], eps: float) -> list[Tensor]:
    tokens = torch.cat(list(values))
    return [(value - tokens.mean()) / (tokens.std() + eps) for value in values]

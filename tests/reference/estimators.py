"""Advantages of the papers, by `formulas` group by group; each returns an entry for each token of each row."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from reference import formulas
from reference.rows import ReferenceRow

Rows = Sequence[ReferenceRow]
Estimator = Callable[[Rows], list[Tensor]]


def spread(row: ReferenceRow, value: float) -> Tensor:
    return torch.full((len(row.given),), value, dtype=torch.float64)


def _by_group(formula: Callable[[Rows], Sequence[float]], rollouts_only: bool = False) -> Estimator:
    """The estimator whose population are the rows of the group, or its rollouts alone; others get 0."""

    def estimate(rows: Rows) -> list[Tensor]:
        found = [spread(row, 0.0) for row in rows]
        for group in {row.group for row in rows}:
            places = [i for i, row in enumerate(rows) if row.group == group and (row.is_rollout or not rollouts_only)]
            population = [rows[i] for i in places]
            for i, value in zip(places, formula(population) if places else (), strict=True):
                found[i] = spread(rows[i], value)
        return found

    return estimate


def _rewards(rows: Rows) -> list[float]:
    return [row.reward for row in rows]


def _centred(rows: Rows) -> list[float]:
    return formulas.group_mean(_rewards(rows), scale_by_std=False)


def _standardised(rows: Rows) -> list[float]:
    return formulas.group_mean(_rewards(rows), scale_by_std=True)


centred = _by_group(_centred)
"""R - mean: Dr.GRPO; LUFFY, demonstrations counted."""
standardised = _by_group(_standardised)
"""GRPO."""
centred_rollouts = _by_group(_centred, rollouts_only=True)
standardised_rollouts = _by_group(_standardised, rollouts_only=True)
leave_one_out = _by_group(lambda rows: formulas.leave_one_out(_rewards(rows)))
length_weighted = _by_group(lambda rows: formulas.length_weighted(_rewards(rows), [len(row.given) for row in rows]))
best_of_two = _by_group(lambda rows: formulas.pass_at_k([row.reward > 0 for row in rows], 2))


def raw(rows: Rows) -> list[Tensor]:
    """REINFORCE without a baseline: the row's own reward."""
    return [spread(row, row.reward) for row in rows]


def without_truncated(estimator: Estimator) -> Estimator:
    """DAPO's overlong filtering: rows cut at the limit count in the baseline and learn nothing."""

    def estimate(rows: Rows) -> list[Tensor]:
        values = estimator(rows)
        return [v * 0 if row.is_truncated else v for row, v in zip(rows, values, strict=True)]

    return estimate


def reinforce_pp_baseline(rows: Rows) -> list[Tensor]:
    """R - mean of the group, then mean 0 and deviation 1 over all tokens of the RL step."""
    return _whitened(centred(rows), eps=1e-6)


def generalised(rows: Rows) -> list[Tensor]:
    """GAE with gamma 1 and lambda 0.95, then whitened."""
    found = [formulas.gae(row.reward, row.value.tolist(), 1.0, 0.95)[0] for row in rows]
    return _whitened([torch.tensor(values, dtype=torch.float64) for values in found], eps=1e-8)


def none(rows: Rows) -> list[Tensor]:
    """Supervised learning has no rewards."""
    return [spread(row, 0.0) for row in rows]


def _whitened(values: Sequence[Tensor], eps: float) -> list[Tensor]:
    tokens = torch.cat(list(values))
    return [(value - tokens.mean()) / (tokens.std() + eps) for value in values]

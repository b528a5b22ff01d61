"""Whole-batch losses of the presets, written from the papers, one sequence at a time, in float64.

A row is `(prompt_ids, response_ids, is_off_policy, advantage, logp_old)`; nothing is padded or packed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class ReferenceRow:
    prompt_ids: Sequence[int]
    response_ids: Sequence[int]
    is_off_policy: bool
    advantage: float
    logp_old: Tensor
    """Per response token."""
    logp_teacher: Tensor | None = None
    """Per response token, where the demonstration's author is known."""


@dataclass(frozen=True)
class RowTerms:
    row: ReferenceRow
    logp: Tensor
    entropy: Tensor


def forward(model: nn.Module, row: ReferenceRow) -> RowTerms:
    ids = torch.tensor([[*row.prompt_ids, *row.response_ids]])
    logits = model(input_ids=ids, use_cache=False).logits[0].double()
    logp_all = torch.log_softmax(logits, dim=-1)
    start = len(row.prompt_ids)
    at = torch.arange(start - 1, start - 1 + len(row.response_ids))
    logp = logp_all[at, torch.tensor(row.response_ids)]
    entropy = -(logp_all[at].exp() * logp_all[at]).sum(-1)
    return RowTerms(row, logp, entropy)


def advantages(rewards: Sequence[float], is_off_policy: Sequence[bool], preset: str) -> list[float]:
    """Of one group, written out: A_i = R_i - mean; `rl_sft_loss` leaves demonstrations outside."""
    if preset == "sft":
        return [0.0] * len(rewards)
    counted = [r for r, off in zip(rewards, is_off_policy, strict=True) if preset != "rl_sft_loss" or not off]
    mean = sum(counted) / len(counted)
    return [0.0 if off and preset == "rl_sft_loss" else r - mean for r, off in zip(rewards, is_off_policy, strict=True)]


def _cat(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(parts)) if parts else torch.zeros(0, dtype=torch.float64)


def _mean(parts: Sequence[Tensor]) -> Tensor:
    tokens = _cat(parts)
    return tokens.sum() / max(len(tokens), 1)


def luffy(rows: Sequence[RowTerms]) -> Tensor:
    """arXiv 2504.14945 eq. 5 with f(x) = x / (x + 0.1), pi_phi = 1 where unknown, no clip; entropy bonus 0.0003."""
    total = torch.zeros((), dtype=torch.float64)
    for r in rows:
        if r.row.is_off_policy:
            rho = r.logp.exp() if r.row.logp_teacher is None else (r.logp - r.row.logp_teacher).exp()
            total = total - (r.row.advantage * rho / (rho + 0.1)).sum()
        else:
            total = total - (r.row.advantage * (r.logp - r.row.logp_old).exp()).sum()
    return total / sum(len(r.logp) for r in rows) - 0.0003 * _mean([r.entropy for r in rows])


def on_policy(rows: Sequence[RowTerms]) -> Tensor:
    """PPO clip 0.2 over all response tokens; entropy bonus 0.0003."""
    parts = []
    for r in rows:
        ratio = (r.logp - r.row.logp_old).exp()
        parts.append(-torch.minimum(ratio * r.row.advantage, ratio.clamp(0.8, 1.2) * r.row.advantage))
    return _mean(parts) - 0.0003 * _mean([r.entropy for r in rows])


def rl_sft_loss(rows: Sequence[RowTerms]) -> Tensor:
    """Unclipped surrogate on rollouts + 1.0 x token-mean cross entropy on demonstrations + entropy of all rows."""
    on = [r for r in rows if not r.row.is_off_policy]
    off = [r for r in rows if r.row.is_off_policy]
    policy = _mean([-r.row.advantage * (r.logp - r.row.logp_old).exp() for r in on])
    return policy + _mean([-r.logp for r in off]) - 0.0003 * _mean([r.entropy for r in rows])


def sft(rows: Sequence[RowTerms]) -> Tensor:
    """Token-mean cross entropy over the whole step."""
    return _mean([-r.logp for r in rows if r.row.is_off_policy])


REFERENCES: dict[str, Callable[[Sequence[RowTerms]], Tensor]] = {
    "luffy": luffy,
    "on_policy": on_policy,
    "rl_sft_loss": rl_sft_loss,
    "sft": sft,
}

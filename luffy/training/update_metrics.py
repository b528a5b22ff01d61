"""What an update reports: sums over micro-batches and ranks, turned into means at the end.

Shape legend: `K` objective terms, `B` rows, `T` tokens.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from luffy.config.objective import ClippedSurrogateLoss, ShapedSurrogateLoss, TermConfig
from luffy.objectives.losses import TokenBatch
from luffy.objectives.normalisation import SumOverRanks
from luffy.objectives.objective import LossOutput
from luffy.objectives.shaping import shape
from luffy.types import TrainBatch


class UpdateMetrics:
    """Accumulates (sum, count) pairs; a mean over nothing is left out rather than reported as 0 or NaN."""

    def __init__(self, terms: Sequence[TermConfig]) -> None:
        self._terms = terms
        self._term_K = torch.zeros(len(terms), dtype=torch.float64)
        self._sums: dict[str, Tensor] = {}

    @torch.no_grad()
    def add(self, batch: TrainBatch, tokens: TokenBatch, output: LossOutput) -> None:
        """Count one micro-batch."""
        self._term_K += output.term_K.double().cpu()
        where = tokens.logp_BT.device
        off_BT = (batch.response_mask_BT & batch.is_off_policy_BT).to(where)
        on_BT = (batch.response_mask_BT & ~batch.is_off_policy_BT).to(where)
        prob_BT = tokens.logp_BT.exp()
        self._mean("actor/entropy_on_policy", tokens.entropy_BT, on_BT)
        self._mean("actor/entropy_off_policy", tokens.entropy_BT, off_BT)
        self._mean("actor/on_policy_prob", prob_BT, on_BT)
        self._mean("actor/off_policy_prob", prob_BT, off_BT)
        self._mean("actor/approx_kl", tokens.logp_old_BT - tokens.logp_BT, on_BT)
        known_BT = on_BT & ~tokens.logp_behavior_BT.isnan()
        self._mean("rollout/logp_gap_mean", (tokens.logp_old_BT - tokens.logp_behavior_BT).abs(), known_BT)
        self._add_losses(tokens, on_BT, off_BT)

    def summary(self, sum_over_ranks: SumOverRanks) -> dict[str, float]:
        """Means over the whole optimizer step, all ranks together."""
        term_K = sum_over_ranks(self._term_K)
        summary = {"actor/loss": float(term_K.sum())}
        summary |= {f"actor/{term.name}_loss": float(share) for term, share in zip(self._terms, term_K, strict=True)}
        for name in _ALL_MEANS:
            total, count = sum_over_ranks(self._sums.get(name, torch.zeros(2, dtype=torch.float64)))
            if count > 0:
                summary[name] = float(total / count)
        return summary

    def _add_losses(self, tokens: TokenBatch, on_BT: Tensor, off_BT: Tensor) -> None:
        for term in self._terms:
            if isinstance(term.loss, ClippedSurrogateLoss):
                ratio_BT = (tokens.logp_BT - tokens.logp_old_BT).exp()
                too_high_BT = (ratio_BT > 1 + term.loss.clip_high) & (tokens.advantage_BT > 0)
                too_low_BT = (ratio_BT < 1 - term.loss.clip_low) & (tokens.advantage_BT < 0)
                self._mean("actor/clip_fraction", (too_high_BT | too_low_BT).double(), on_BT)
            elif isinstance(term.loss, ShapedSurrogateLoss):
                log_rho_BT = tokens.logp_BT - torch.nan_to_num(tokens.logp_behavior_BT, nan=0.0)
                self._mean("actor/off_policy_weight_mean", shape(log_rho_BT, term.loss.shaping), off_BT)

    def _mean(self, name: str, value_BT: Tensor, mask_BT: Tensor) -> None:
        selected_N = value_BT[mask_BT].double().cpu()
        pair = torch.stack([selected_N.sum(), torch.tensor(float(len(selected_N)), dtype=torch.float64)])
        self._sums[name] = self._sums.get(name, torch.zeros(2, dtype=torch.float64)) + pair


# Every rank sums the same list in the same order, whatever its own rows were.
_ALL_MEANS = (
    "actor/entropy_on_policy",
    "actor/entropy_off_policy",
    "actor/on_policy_prob",
    "actor/off_policy_prob",
    "actor/approx_kl",
    "actor/clip_fraction",
    "actor/off_policy_weight_mean",
    "rollout/logp_gap_mean",
)

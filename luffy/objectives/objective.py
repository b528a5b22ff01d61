"""The objective: a list of terms, evaluated on one micro-batch with weights fixed for the whole optimizer step.

A term's correction and masks (`token_factor`) are constant factors that are known only in the forward pass.

Shape legend: `K` terms, `B` rows, `T` tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from luffy.config.terms import EntropyLoss, ImportanceCorrection, TermConfig, is_untempered
from luffy.objectives.losses import TokenBatch, token_loss
from luffy.objectives.ratios import bounded_exp, sequence_sum


@dataclass(frozen=True, slots=True)
class LossOutput:
    """The loss of a micro-batch and its parts."""

    loss: Tensor
    """Scalar: this micro-batch's share of the step's loss; shares add up over micro-batches and ranks."""
    term_K: Tensor
    """Share of each term in `loss`, with gradient."""


def needs_entropy_gradient(terms: Sequence[TermConfig]) -> bool:
    """Whether a term differentiates the entropy (otherwise it is only measured)."""
    return any(isinstance(term.loss, EntropyLoss) for term in terms)


def needs_untempered(terms: Sequence[TermConfig]) -> bool:
    """Whether a term sees the policy at temperature 1."""
    return any(is_untempered(term.loss) for term in terms)


def objective_loss(terms: Sequence[TermConfig], tokens: TokenBatch, weight_KBT: Tensor) -> LossOutput:
    """Sum over terms and tokens of weight x token loss.

    `weight_KBT` is the micro-batch's part of `token_weights` for the whole step; `tokens.selected_BT` is not read.
    Tokens of weight 0 are set to 0 before the loss: an overflow at an unselected token would otherwise come back as
    0 x inf = NaN in the gradient.
    """
    shares = []
    for term, weight_BT in zip(terms, weight_KBT, strict=True):
        selected = only(tokens, weight_BT != 0)
        loss_BT = token_loss(term.loss, selected)
        factor_BT = token_factor(selected, term)
        shares.append(((loss_BT if factor_BT is None else loss_BT * factor_BT) * weight_BT).sum())
    term_K = torch.stack(shares)
    return LossOutput(loss=term_K.sum(), term_K=term_K)


def only(tokens: TokenBatch, selected_BT: Tensor) -> TokenBatch:
    """The tokens as a term that selects `selected_BT` sees them: 0 everywhere else."""
    kept = {
        field.name: torch.where(selected_BT, getattr(tokens, field.name), 0.0)
        for field in fields(tokens)
        if field.name not in ("sequence_BT", "selected_BT")
    }
    return TokenBatch(**kept, sequence_BT=tokens.sequence_BT, selected_BT=selected_BT)


@torch.no_grad()
def token_factor(tokens: TokenBatch, term: TermConfig) -> Tensor | None:
    """`(B, T)` factor of the term's correction and masks; None where it has neither.

    The denominators of `luffy.objectives.normalisation` count tokens before these factors.
    """
    factors = []
    if term.correction is not None:
        factors.append(importance_correction(tokens, term.correction))
    if term.top_entropy_share is not None:
        factors.append(top_entropy_mask(tokens, term.top_entropy_share))
    return torch.stack(factors).prod(dim=0) if factors else None


def importance_correction(tokens: TokenBatch, config: ImportanceCorrection) -> Tensor:
    """w = pi_old / mu, truncated at `high` or set to 0 outside [low, high]; 1 where mu is unknown."""
    known_BT = tokens.selected_BT & ~tokens.logp_behavior_BT.isnan()
    log_ratio_BT = torch.where(known_BT, tokens.logp_old_BT - tokens.logp_behavior_BT, 0.0)
    if config.level == "sequence":
        log_ratio_BT = sequence_sum(log_ratio_BT, tokens.sequence_BT)
    ratio_BT = bounded_exp(log_ratio_BT)
    if config.kind == "truncate":
        return ratio_BT.clamp(max=config.high)
    return torch.where((ratio_BT >= config.low) & (ratio_BT <= config.high), ratio_BT, 0.0)


def top_entropy_mask(tokens: TokenBatch, share: float) -> Tensor:
    """1 on the `share` of each sequence's selected tokens (rounded up) with the highest entropy, 0 elsewhere."""
    mask_BT = torch.zeros_like(tokens.logp_BT)
    for sequence in tokens.sequence_BT[tokens.selected_BT].unique():
        own_BT = tokens.selected_BT & (tokens.sequence_BT == sequence)
        entropy_N = tokens.entropy_BT[own_BT]
        # Rounded first: 0.2 of 15 tokens is 3, not the 4 above 3.0000000000000004.
        count = int(-(-round(share * len(entropy_N), 9) // 1))
        # A stable sort: tokens of equal entropy keep their order, whatever the layout.
        top_N = entropy_N.sort(descending=True, stable=True).indices[:count]
        mask_BT[own_BT] = torch.zeros_like(entropy_N).index_fill(0, top_N, 1.0)
    return mask_BT

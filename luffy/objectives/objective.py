"""The objective: a list of terms, evaluated on one micro-batch with weights fixed for the whole optimizer step.

Shape legend: `K` terms, `B` rows, `T` tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from luffy.config.objective import EntropyLoss, TermConfig, is_untempered
from luffy.objectives.losses import TokenBatch, token_loss
from luffy.objectives.modifiers import token_factor


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

"""The objective: a list of terms, evaluated on one micro-batch with weights fixed for the whole optimizer step."""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from luffy.config.objective import EntropyLoss, TermConfig
from luffy.objectives.losses import TokenBatch, token_loss


@dataclass(frozen=True, slots=True)
class LossOutput:
    """The loss of a micro-batch and its parts."""

    loss: Tensor
    """Scalar: this micro-batch's share of the step's loss; shares add up over micro-batches and ranks."""
    term_K: Tensor
    """Detached share of each term in `loss`."""


def needs_entropy_gradient(terms: Sequence[TermConfig]) -> bool:
    """Whether a term differentiates the entropy (otherwise it is only measured)."""
    return any(isinstance(term.loss, EntropyLoss) and term.coefficient for term in terms)


def objective_loss(terms: Sequence[TermConfig], tokens: TokenBatch, weight_KBT: Tensor) -> LossOutput:
    """Sum over terms and tokens of weight x token loss.

    `weight_KBT` comes from `token_weights` for the whole step, cut like the micro-batch. Tokens of weight 0 are blanked
    before the loss: an overflow at a token nobody selected would otherwise come back as 0 x inf = NaN in the gradient.
    """
    shares = []
    for term, weight_BT in zip(terms, weight_KBT, strict=True):
        loss_BT = token_loss(_blank_unselected(tokens, weight_BT != 0), term.loss)
        shares.append((loss_BT * weight_BT).sum())
    term_K = torch.stack(shares)
    return LossOutput(loss=term_K.sum(), term_K=term_K.detach())


def _blank_unselected(tokens: TokenBatch, selected_BT: Tensor) -> TokenBatch:
    return TokenBatch(
        **{field.name: torch.where(selected_BT, getattr(tokens, field.name), 0.0) for field in fields(tokens)}
    )

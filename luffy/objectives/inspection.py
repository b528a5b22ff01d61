"""What an objective does to single tokens, for metrics only; never a part of the loss.

Shape legend: `K` terms, `B` rows, `T` tokens.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import singledispatch

import torch
from torch import Tensor

from luffy.config.terms import (
    AipoLoss,
    CispoLoss,
    ClippedSurrogateLoss,
    LossConfig,
    MultipleImportanceLoss,
    SequenceSurrogateLoss,
    ShapedSurrogateLoss,
    SurrogateLoss,
    TermConfig,
)
from luffy.objectives.losses import TokenBatch, log_rho, logp_sampler, moved_too_far
from luffy.objectives.objective import objective_loss, only, token_factor
from luffy.objectives.ratios import sequence_mean
from luffy.objectives.shaping import shape


@torch.enable_grad()
def logp_gradients(terms: Sequence[TermConfig], tokens: TokenBatch, weight_KBT: Tensor) -> Tensor:
    """`(K, B, T)` derivative of each term's loss by logp: the factor on grad log pi_theta of every token.

    Each term is differentiated by the log-probability that it uses: at the rollouts' temperature or at temperature 1.
    """
    leaves = [logp_BT.detach().requires_grad_() for logp_BT in (tokens.logp_BT, tokens.untempered_logp_BT)]
    alone = replace(
        tokens,
        logp_BT=leaves[0],
        untempered_logp_BT=leaves[1],
        entropy_BT=tokens.entropy_BT.detach(),
        untempered_entropy_BT=tokens.untempered_entropy_BT.detach(),
    )
    shares = objective_loss(terms, alone, weight_KBT).term_K.unbind()
    return torch.stack([_gradient_sum(share, leaves) for share in shares])


def _gradient_sum(share: Tensor, leaves: Sequence[Tensor]) -> Tensor:
    gradients = torch.autograd.grad(share, leaves, retain_graph=True, allow_unused=True)
    return sum((gradient for gradient in gradients if gradient is not None), torch.zeros_like(leaves[0]))


@torch.no_grad()
def limited(tokens: TokenBatch, term: TermConfig, selected_BT: Tensor) -> Tensor:
    """`(B, T)` bool: selected tokens that a policy-gradient term clips, truncates or masks."""
    own = only(tokens, selected_BT)
    limited_BT = _limited(term.loss, own)
    bare = term.model_copy(update={"correction": _without_limits(term)})
    found, unlimited = token_factor(own, term), token_factor(own, bare.model_copy(update={"top_entropy_share": None}))
    if found is not None:
        limited_BT = limited_BT | (found != (1.0 if unlimited is None else unlimited))
    return limited_BT & selected_BT


def _without_limits(term: TermConfig) -> object:
    if term.correction is None:
        return None
    return term.correction.model_copy(update={"kind": "truncate", "low": 0.0, "high": float("inf")})


@singledispatch
def _limited(config: LossConfig, tokens: TokenBatch) -> Tensor:
    """`(B, T)` bool of one kind of loss; without a default, so that a new loss cannot report 0 % clipped by mistake."""
    raise NotImplementedError(f"no limits for {type(config).__name__}")


@_limited.register
def _nowhere(config: SurrogateLoss | MultipleImportanceLoss, tokens: TokenBatch) -> Tensor:
    return torch.zeros_like(tokens.selected_BT)


@_limited.register
def _clipped(config: ClippedSurrogateLoss, tokens: TokenBatch) -> Tensor:
    ratio_BT = (tokens.logp_BT - tokens.logp_old_BT).exp()
    outside_BT = _outside(ratio_BT, tokens.advantage_BT, config.clip_low, config.clip_high)
    if config.dual_clip is not None:
        outside_BT = outside_BT | ((ratio_BT > config.dual_clip) & (tokens.advantage_BT < 0))
    return outside_BT


@_limited.register
def _clipped_sequence(config: SequenceSurrogateLoss, tokens: TokenBatch) -> Tensor:
    log_ratio_BT = sequence_mean(tokens.logp_BT - tokens.logp_old_BT, tokens.selected_BT, tokens.sequence_BT)
    return _outside(log_ratio_BT.exp(), tokens.advantage_BT, config.clip_low, config.clip_high)


def _outside(ratio_BT: Tensor, advantage_BT: Tensor, low: float, high: float) -> Tensor:
    """Where the minimum takes the clipped branch: r moved in the direction of A, and too far."""
    return ((ratio_BT > 1 + high) & (advantage_BT > 0)) | ((ratio_BT < 1 - low) & (advantage_BT < 0))


@_limited.register
def _truncated_cispo(config: CispoLoss, tokens: TokenBatch) -> Tensor:
    ratio_BT = (tokens.logp_BT - tokens.logp_old_BT).exp()
    return (ratio_BT > 1 + config.clip_high) | (ratio_BT < (0.0 if config.clip_low is None else 1 - config.clip_low))


@_limited.register
def _truncated_aipo(config: AipoLoss, tokens: TokenBatch) -> Tensor:
    return (tokens.logp_BT - logp_sampler(tokens)).exp() > config.max_ratio


@_limited.register
def _clamped(config: ShapedSurrogateLoss, tokens: TokenBatch) -> Tensor:
    weight_BT = shape(config.shaping, log_rho(config, tokens))
    low = float("-inf") if config.min_weight is None else config.min_weight
    high = float("inf") if config.max_weight is None else config.max_weight
    return (weight_BT < low) | (weight_BT > high)


_limited.register(moved_too_far)

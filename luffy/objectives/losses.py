"""Per-token losses, the innermost line of every method.

Each takes the tokens of a micro-batch and returns a loss of shape `(B, T)`; which tokens count, and by how much, is
decided outside (`luffy.objectives.normalisation`). Values at unselected tokens are arbitrary but finite.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from luffy.config.objective import (
    ClippedSurrogateLoss,
    EntropyLoss,
    LossConfig,
    NegativeLogLikelihoodLoss,
    ShapedSurrogateLoss,
    SurrogateLoss,
)
from luffy.objectives.shaping import shape


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """What a loss may look at; every tensor is `(B, T)`."""

    logp_BT: Tensor
    """log pi_theta of the tokens, with gradient."""
    entropy_BT: Tensor
    """Entropy of pi_theta at the tokens, in nats."""
    logp_old_BT: Tensor
    """Trainer's log-probabilities at the start of the optimizer phase, constant."""
    logp_behavior_BT: Tensor
    """Log-probabilities under what drew the tokens, constant; NaN where unknown."""
    advantage_BT: Tensor


def surrogate(tokens: TokenBatch, config: SurrogateLoss) -> Tensor:
    """-A r, r = exp(logp - logp_old): LUFFY's on-policy term, without clip (appendix E.1)."""
    return -tokens.advantage_BT * torch.exp(tokens.logp_BT - tokens.logp_old_BT)


def clipped_surrogate(tokens: TokenBatch, config: ClippedSurrogateLoss) -> Tensor:
    """-min(A r, A clip(r, 1 - low, 1 + high)): PPO (arXiv 1707.06347, eq. 7); high > low: DAPO (2503.14476)."""
    ratio_BT = torch.exp(tokens.logp_BT - tokens.logp_old_BT)
    clipped_BT = ratio_BT.clamp(1 - config.clip_low, 1 + config.clip_high)
    return -torch.minimum(tokens.advantage_BT * ratio_BT, tokens.advantage_BT * clipped_BT)


def shaped_surrogate(tokens: TokenBatch, config: ShapedSurrogateLoss) -> Tensor:
    """-A f(rho), rho = pi_theta / pi_phi, with pi_phi = 1 where the teacher is unknown (LUFFY eq. 6)."""
    log_rho_BT = tokens.logp_BT - torch.nan_to_num(tokens.logp_behavior_BT, nan=0.0)
    return -tokens.advantage_BT * shape(log_rho_BT, config.shaping)


def nll(tokens: TokenBatch, config: NegativeLogLikelihoodLoss) -> Tensor:
    """-log pi_theta: cross entropy on demonstrations."""
    return -tokens.logp_BT


def entropy(tokens: TokenBatch, config: EntropyLoss) -> Tensor:
    """-H(pi_theta): minimising it raises entropy."""
    return -tokens.entropy_BT


_LOSSES: dict[str, Callable[[TokenBatch, LossConfig], Tensor]] = {
    "surrogate": surrogate,  # type: ignore[dict-item]
    "clipped_surrogate": clipped_surrogate,  # type: ignore[dict-item]
    "shaped_surrogate": shaped_surrogate,  # type: ignore[dict-item]
    "nll": nll,  # type: ignore[dict-item]
    "entropy": entropy,  # type: ignore[dict-item]
}


def token_loss(tokens: TokenBatch, config: LossConfig) -> Tensor:
    """`(B, T)` loss of the configured kind."""
    return _LOSSES[config.kind](tokens, config)

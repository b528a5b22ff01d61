"""Constant factors on a term's token losses that are known only in the forward pass.

Shape legend: `B` rows, `T` tokens.
"""

import torch
from torch import Tensor

from luffy.config.objective import ImportanceCorrection, TermConfig
from luffy.objectives.losses import TokenBatch
from luffy.objectives.ratios import bounded_exp, sequence_sum


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

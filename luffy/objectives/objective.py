"""The objective: a list of terms, evaluated on one micro-batch with weights fixed for the whole optimizer step.

A term is a sum over its tokens divided by a denominator that is counted once over the *whole optimizer step*: all
micro-batches, all ranks. So every token has one weight (`token_weights`), fixed before the first forward pass, and the
split of the step into micro-batches cannot change the gradient. A term's correction and masks (`token_factor`) are
constant factors that are known only in the forward pass. What the objective does to single tokens (`logp_gradients`,
`LossOutput.limited_KBT`) is for metrics only, never a part of the loss.

Shape legend: `K` terms, `B` rows, `T` tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import reduce

import torch
from torch import Tensor

from luffy.config.terms import GateConfig, ImportanceCorrection, Selector, TermConfig, WeighConfig
from luffy.objectives.losses import TokenBatch, bounded_exp, sequence_sum, token_loss
from luffy.objectives.schedules import StepObjective
from luffy.types import TrainBatch

SumOverRanks = Callable[[Tensor], Tensor]
"""Gives the sum of a tensor over all data-parallel ranks, the same on each."""


def select(batch: TrainBatch, selector: Selector) -> Tensor:
    """`(B, T)` bool: the response tokens that a term looks at."""
    if selector == "response":
        return batch.response_mask_BT
    wanted_BT = batch.is_off_policy_BT if selector == "off_policy" else ~batch.is_off_policy_BT
    return batch.response_mask_BT & wanted_BT


def passes(batch: TrainBatch, gate: GateConfig | None, teachers: Sequence[str]) -> Tensor:
    """`(B, T)` bool: the rows that pass a gate; `teachers` are the names in `rl.teachers`, in order."""
    open_BT = torch.ones_like(batch.response_mask_BT)
    if gate is None:
        return open_BT
    if gate.group_accuracy_above is not None:
        open_BT = open_BT & (batch.group_accuracy_BT > gate.group_accuracy_above)
    if gate.group_accuracy_at_most is not None:
        open_BT = open_BT & (batch.group_accuracy_BT <= gate.group_accuracy_at_most)
    if isinstance(gate.taught, str):
        open_BT = open_BT & (batch.taught_by_BT == teachers.index(gate.taught))
    elif gate.taught is not None:
        open_BT = open_BT & ((batch.taught_by_BT >= 0) == gate.taught)
    if gate.outcome is not None:
        open_BT = open_BT & (batch.is_correct_BT == (gate.outcome == "correct"))
    return open_BT


def token_weights(objective: StepObjective, batch: TrainBatch, sum_over_ranks: SumOverRanks) -> Tensor:
    """`(K, B, T)` float64: coefficient / denominator on each term's tokens, 0 elsewhere.

    `batch` is this rank's share of the optimizer step. The loss of the step is the sum over ranks, terms and tokens of
    weight x token loss. A term without a token anywhere gets weight 0, never NaN.
    """
    terms = objective.terms
    if not terms:
        return torch.zeros(0, *batch.input_ids_BT.shape, dtype=torch.float64)
    share_KBT = torch.zeros(len(terms), *batch.input_ids_BT.shape, dtype=torch.float64)
    denominator_K = torch.zeros(len(terms), dtype=torch.float64)
    for k, term in enumerate(terms):
        counted_BT = _counted(term, objective, batch)
        denominator_K[k] = _denominator(counted_BT, batch.episode_BT, term, objective.max_response_tokens)
        own_BT = select(batch, term.select) & passes(batch, term.gate, objective.teachers)
        share_KBT[k] = own_BT.double() if term.weigh is None else _weighed(own_BT, term.weigh, batch, sum_over_ranks)
        if term.normaliser.mode == "sequence":
            # Numbered anew: a rank's part of the step may have fewer tokens than the step has responses.
            _, episode_BT = batch.episode_BT.unique(return_inverse=True)
            share_KBT[k] /= sequence_sum(counted_BT.double(), episode_BT).clamp(min=1)
    denominator_K = sum_over_ranks(denominator_K)
    coefficient_K = torch.tensor(objective.coefficients, dtype=torch.float64)
    scale_K = torch.where(denominator_K > 0, coefficient_K / denominator_K.clamp(min=1), 0.0)
    return share_KBT * scale_K[:, None, None]


def _weighed(own_BT: Tensor, config: WeighConfig, batch: TrainBatch, sum_over_ranks: SumOverRanks) -> Tensor:
    """`(B, T)` float64: exp(-beta H) on a term's own tokens, over its mean on those of the step; 0 elsewhere."""
    weight_BT = (-config.teacher_entropy * batch.entropy_teacher_BT.double()).exp() * own_BT
    count, total = sum_over_ranks(torch.stack([own_BT.sum().double(), weight_BT.sum()]))
    return weight_BT * (count / total) if total > 0 else weight_BT


def _counted(term: TermConfig, objective: StepObjective, batch: TrainBatch) -> Tensor:
    """`(B, T)` bool: the tokens that a term's denominator counts."""
    if term.normaliser.population == "all":
        return batch.response_mask_BT
    joint = term.normaliser.population == "joint"
    members = [other for other in objective.terms if other.is_policy_gradient] if joint else [term]
    masks = [select(batch, member.select) for member in members]
    if not term.normaliser.before_gate:
        gates = [passes(batch, member.gate, objective.teachers) for member in members]
        masks = [mask_BT & open_BT for mask_BT, open_BT in zip(masks, gates, strict=True)]
    return reduce(torch.logical_or, masks)


def _denominator(counted_BT: Tensor, episode_BT: Tensor, term: TermConfig, max_response_tokens: int) -> Tensor:
    if term.normaliser.mode == "token":
        return counted_BT.sum().double()
    # An episode with several contexts is several rows, and one response.
    num_responses = episode_BT[counted_BT].unique().numel()
    per_response = max_response_tokens if term.normaliser.mode == "constant" else 1
    return torch.tensor(num_responses * per_response, dtype=torch.float64)


@dataclass(frozen=True, slots=True)
class LossOutput:
    """The loss of a micro-batch and its parts."""

    loss: Tensor
    """Scalar: this micro-batch's share of the step's loss; shares add up over micro-batches and ranks."""
    term_K: Tensor
    """Share of each term in `loss`, with gradient."""
    limited_KBT: Tensor
    """bool: the term's tokens that its loss or its correction clips, truncates or masks."""


def objective_loss(terms: Sequence[TermConfig], tokens: TokenBatch, weight_KBT: Tensor) -> LossOutput:
    """Sum over terms and tokens of weight x token loss.

    `weight_KBT` is the micro-batch's part of `token_weights` for the whole step; `tokens.selected_BT` is not read.
    Tokens of weight 0 are set to 0 before the loss: an overflow at an unselected token would otherwise come back as
    0 x inf = NaN in the gradient.
    """
    shares, limits = [], []
    for term, weight_BT in zip(terms, weight_KBT, strict=True):
        selected = only(tokens, weight_BT != 0)
        loss_BT, limited_BT = token_loss(term.loss, selected)
        limited_BT = torch.zeros_like(selected.selected_BT) if limited_BT is None else limited_BT
        if (factor := token_factor(selected, term)) is not None:
            factor_BT, out_of_bounds_BT = factor
            loss_BT, limited_BT = loss_BT * factor_BT, limited_BT | out_of_bounds_BT
        shares.append((loss_BT * weight_BT).sum())
        limits.append(limited_BT & selected.selected_BT)
    term_K = torch.stack(shares)
    return LossOutput(loss=term_K.sum(), term_K=term_K, limited_KBT=torch.stack(limits))


def only(tokens: TokenBatch, selected_BT: Tensor) -> TokenBatch:
    """The tokens as a term that selects `selected_BT` sees them: 0 everywhere else."""
    kept = {}
    for name in (field.name for field in fields(tokens) if field.name not in ("sequence_BT", "selected_BT")):
        found = getattr(tokens, name)
        kept[name] = torch.where(selected_BT if found.dim() == 2 else selected_BT.unsqueeze(-1), found, 0.0)
    return TokenBatch(**kept, sequence_BT=tokens.sequence_BT, selected_BT=selected_BT)


@torch.no_grad()
def token_factor(tokens: TokenBatch, term: TermConfig) -> tuple[Tensor, Tensor] | None:
    """`(B, T)` factor of the term's correction, evidence and masks, and bool, where its correction or a mask limits
    it; None where the term has none of them.

    The denominators of `token_weights` count tokens before these factors.
    """
    factors, limited_BT = [], torch.zeros_like(tokens.selected_BT)
    if term.correction is not None:
        correction_BT, limited_BT = importance_correction(tokens, term.correction)
        factors.append(correction_BT)
    if term.evidence is not None:
        log_ratio_BT = (tokens.logp_teacher_BT - tokens.logp_old_BT) * tokens.advantage_BT.sign()
        log_ratio_BT = -log_ratio_BT if term.evidence.reverse else log_ratio_BT
        factors.append(bounded_exp(log_ratio_BT).clamp(1 - term.evidence.clip, 1 + term.evidence.clip))
    if term.top_entropy_share is not None:
        factors.append(top_entropy_mask(tokens, term.top_entropy_share))
        limited_BT = limited_BT | (factors[-1] == 0)
    return (torch.stack(factors).prod(dim=0), limited_BT) if factors else None


def importance_correction(tokens: TokenBatch, config: ImportanceCorrection) -> tuple[Tensor, Tensor]:
    """w = pi_old / mu, truncated at `high` or set to 0 outside [low, high], 1 where mu is unknown; and where that
    changes it."""
    known_BT = tokens.selected_BT & ~tokens.logp_behavior_BT.isnan()
    log_ratio_BT = torch.where(known_BT, tokens.logp_old_BT - tokens.logp_behavior_BT, 0.0)
    if config.level == "sequence":
        log_ratio_BT = sequence_sum(log_ratio_BT, tokens.sequence_BT)
    ratio_BT = bounded_exp(log_ratio_BT)
    limited_BT = ratio_BT > config.high
    if config.kind == "truncate":
        return ratio_BT.clamp(max=config.high), limited_BT
    limited_BT = limited_BT | (ratio_BT < config.low)
    return ratio_BT.masked_fill(limited_BT, 0.0), limited_BT


def top_entropy_mask(tokens: TokenBatch, share: float) -> Tensor:
    """1 on the `share` of each sequence's selected tokens (rounded up) with the highest entropy, 0 elsewhere."""
    selected_N, sequence_N = tokens.selected_BT.flatten(), tokens.sequence_BT.flatten()
    entropy_N = tokens.entropy_BT.flatten().masked_fill(~selected_N, -torch.inf)
    # Sequence after sequence, each from its highest entropy to its lowest, then what is not selected. Stable sorts:
    # tokens of equal entropy keep their order, whatever the layout.
    order_N = entropy_N.argsort(descending=True, stable=True)
    order_N = order_N[sequence_N[order_N].argsort(stable=True)]
    place_N = torch.empty_like(order_N).scatter_(0, order_N, torch.arange(len(order_N), device=order_N.device))
    size_S = torch.zeros_like(order_N).index_add_(0, sequence_N, torch.ones_like(order_N))
    rank_N = place_N - (size_S.cumsum(0) - size_S)[sequence_N]
    # Rounded first: 0.55 of 100 tokens is 55, not the 56 above 55.00000000000001.
    count_BT = (share * sequence_sum(tokens.selected_BT.double(), tokens.sequence_BT)).round(decimals=9).ceil()
    return (tokens.selected_BT & (rank_N.view_as(count_BT) < count_BT)).to(tokens.logp_BT.dtype)


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
        logp_BTC=tokens.logp_BTC.detach(),
    )
    term_K = objective_loss(terms, alone, weight_KBT).term_K
    if not term_K.requires_grad:  # all terms are divergences, which look at other tokens
        return torch.zeros_like(weight_KBT, dtype=leaves[0].dtype)
    zeros_BT, gradients = torch.zeros_like(leaves[0]), []
    for share in term_K.unbind():
        found = torch.autograd.grad(share, leaves, retain_graph=True, allow_unused=True)
        gradients.append(sum((each for each in found if each is not None), zeros_BT))
    return torch.stack(gradients)

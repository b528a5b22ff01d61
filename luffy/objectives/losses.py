"""Per-token losses, the innermost formula of every method.

Each takes the tokens of a micro-batch and returns a `TokenLoss`; which tokens count, and by how much, is decided
outside (`luffy.objectives.objective`). Values at unselected tokens are arbitrary but finite.

Shape legend: `B` rows, `T` tokens, `C` choices of a teacher, the last of which stands for all other tokens of the
vocabulary; a packed row holds several sequences, `S` in all.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import singledispatch
from typing import NamedTuple

import torch
from torch import Tensor

from luffy.config.terms import (
    AipoLoss,
    CispoLoss,
    ClippedSurrogateLoss,
    CustomInput,
    CustomLoss,
    DistillationLoss,
    DivergenceLoss,
    EntropyLoss,
    IdentityShaping,
    KLLoss,
    LinearLogShaping,
    LogShaping,
    LossConfig,
    MultipleImportanceLoss,
    NegativeLogLikelihoodLoss,
    PowerShaping,
    RationalShaping,
    SequenceSurrogateLoss,
    ShapedSurrogateLoss,
    ShapingConfig,
    SurrogateLoss,
    TermConfig,
    TokenWeight,
    TotalVariationMaskedLoss,
    is_untempered,
)
from luffy.errors import ConfigError
from luffy.objectives.custom import called

_MAX_ABS_LOG_RATIO = 20.0
"""Bound on the log-ratio of a divergence, both ways, as in the common frameworks."""


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """Input of the losses; every tensor is `(B, T)` or `(B, T, C)`."""

    logp_BT: Tensor
    """log pi_theta of the tokens at the temperature of the rollouts, with gradient."""
    entropy_BT: Tensor
    """Entropy of pi_theta at the tokens at that temperature, in nats."""
    untempered_logp_BT: Tensor
    """log pi_theta at temperature 1, with gradient; `logp_BT` where no term asks for it."""
    untempered_entropy_BT: Tensor
    """Entropy at temperature 1; `entropy_BT` where no term asks for it."""
    logp_old_BT: Tensor
    """Trainer's log-probabilities at the start of the optimizer phase, constant."""
    logp_behavior_BT: Tensor
    """Log-probabilities under the policy that sampled the tokens, constant; NaN where unknown."""
    logp_ref_BT: Tensor
    """Log-probabilities under the reference of `kl` terms, constant."""
    logp_teacher_BT: Tensor
    """Log-probabilities under the row's teacher, constant."""
    logp_BTC: Tensor
    """log pi_theta of the tokens that divergences compare, at the temperature of the rollouts, with gradient; empty
    without a divergence."""
    logq_BTC: Tensor
    """The teacher's, constant."""
    advantage_BT: Tensor
    sequence_BT: Tensor
    """int64: tokens of the same sequence share a number, which is below the number of tokens."""
    selected_BT: Tensor
    """bool: the term's tokens; the other tensors are 0 elsewhere."""


class TokenLoss(NamedTuple):
    """What a loss function returns."""

    loss_BT: Tensor
    limited_BT: Tensor | None = None
    """bool: where a clip, a bound or a mask of the loss took effect; None: it has none."""


@singledispatch
def token_loss(config: LossConfig, tokens: TokenBatch) -> TokenLoss:
    """The loss of the configured kind: the function below that is registered for the class of `config`."""
    raise NotImplementedError(f"no loss for {type(config).__name__}")


@token_loss.register
def surrogate(config: SurrogateLoss, tokens: TokenBatch) -> TokenLoss:
    """-A r, r = exp(logp - logp_old): LUFFY's on-policy term, without clip (appendix E.1)."""
    return TokenLoss(-tokens.advantage_BT * bounded_exp(tokens.logp_BT - tokens.logp_old_BT))


@token_loss.register
def clipped_surrogate(config: ClippedSurrogateLoss, tokens: TokenBatch) -> TokenLoss:
    """-min(A r, A clip(r, 1 - low, 1 + high)): PPO (arXiv 1707.06347, eq. 7); high > low: DAPO (2503.14476)."""
    ratio_BT = bounded_exp(tokens.logp_BT - tokens.logp_old_BT)
    objective_BT, limited_BT = _clipped_minimum(ratio_BT, tokens.advantage_BT, config.clip_low, config.clip_high)
    if config.dual_clip is not None:
        is_negative_BT, floor_BT = tokens.advantage_BT < 0, config.dual_clip * tokens.advantage_BT
        objective_BT = torch.where(is_negative_BT, torch.maximum(objective_BT, floor_BT), objective_BT)
        limited_BT = limited_BT | (is_negative_BT & (ratio_BT > config.dual_clip))
    return TokenLoss(-objective_BT, limited_BT)


@token_loss.register
def sequence_surrogate(config: SequenceSurrogateLoss, tokens: TokenBatch) -> TokenLoss:
    """-min(A s, A clip(s)), s = exp(mean_t (logp_t - logp_old_t)): GSPO (arXiv 2507.18071, eq. 5 to 7).

    Every token of a sequence carries the sequence's loss, so under `mode: sequence` each counts once.
    """
    log_ratio_BT = sequence_mean(tokens.logp_BT - tokens.logp_old_BT, tokens.selected_BT, tokens.sequence_BT)
    objective_BT, limited_BT = _clipped_minimum(
        bounded_exp(log_ratio_BT), tokens.advantage_BT, config.clip_low, config.clip_high
    )
    return TokenLoss(-objective_BT, limited_BT)


@token_loss.register
def cispo(config: CispoLoss, tokens: TokenBatch) -> TokenLoss:
    """-sg(clip(r)) A logp (arXiv 2506.13585, eq. 4 and 5)."""
    ratio_BT = bounded_exp(tokens.logp_BT - tokens.logp_old_BT).detach()
    low, high = 0.0 if config.clip_low is None else 1 - config.clip_low, 1 + config.clip_high
    loss_BT = -ratio_BT.clamp(low, high) * tokens.advantage_BT * tokens.logp_BT
    return TokenLoss(loss_BT, (ratio_BT < low) | (ratio_BT > high))


@token_loss.register
def aipo(config: AipoLoss, tokens: TokenBatch) -> TokenLoss:
    """-sg(min(pi_theta / mu, max_ratio)) A logp (arXiv 2505.24034)."""
    ratio_BT = bounded_exp(tokens.logp_BT - logp_sampler(tokens)).detach()
    loss_BT = -ratio_BT.clamp(max=config.max_ratio) * tokens.advantage_BT * tokens.logp_BT
    return TokenLoss(loss_BT, ratio_BT > config.max_ratio)


@token_loss.register
def tv_masked_surrogate(config: TotalVariationMaskedLoss, tokens: TokenBatch) -> TokenLoss:
    """-A pi_theta / mu on tokens whose probability has not moved too far in the direction of A."""
    logp_mu_BT = logp_sampler(tokens)
    loss_BT = -tokens.advantage_BT * bounded_exp(tokens.logp_BT - logp_mu_BT)
    moved_BT = tokens.logp_BT.detach().exp() - logp_mu_BT.exp()
    is_up_BT = tokens.advantage_BT > 0
    limited_BT = torch.where(is_up_BT, moved_BT > config.max_increase, -moved_BT > config.max_decrease)
    return TokenLoss(loss_BT.masked_fill(limited_BT, 0.0), limited_BT)


@token_loss.register
def shaped_surrogate(config: ShapedSurrogateLoss, tokens: TokenBatch) -> TokenLoss:
    """-A f(rho), rho = pi_theta / pi_phi (LUFFY eq. 6)."""
    log_rho_BT = tokens.logp_BT
    if config.behavior == "recorded":  # pi_phi = 1 where the data has no log-probability
        log_rho_BT = log_rho_BT - torch.nan_to_num(tokens.logp_behavior_BT, nan=0.0)
    weight_BT, limited_BT = shape(config.shaping, log_rho_BT), None
    if config.min_weight is not None or config.max_weight is not None:
        bounded_BT = weight_BT.clamp(config.min_weight, config.max_weight)
        weight_BT, limited_BT = bounded_BT, bounded_BT != weight_BT
    return TokenLoss(-tokens.advantage_BT * weight_BT, limited_BT)


@token_loss.register
def multiple_importance(config: MultipleImportanceLoss, tokens: TokenBatch) -> TokenLoss:
    """-A (1 - sg(p))^e 2 p / (p_old + (p_old + 1) / 2): RL-PLUS (arXiv 2508.00222)."""
    p_BT, p_old_BT = tokens.logp_BT.exp(), tokens.logp_old_BT.exp()
    # p may round to just above 1.
    exploration_BT = (1 - p_BT.detach()).clamp(min=0.0) ** config.exploration_exponent
    return TokenLoss(-tokens.advantage_BT * exploration_BT * 2 * p_BT / (p_old_BT + 0.5 * (p_old_BT + 1)))


@token_loss.register
def nll(config: NegativeLogLikelihoodLoss, tokens: TokenBatch) -> TokenLoss:
    """-sg(w) log pi_theta: cross entropy on demonstrations."""
    tokens = at_temperature(tokens, config)
    return TokenLoss(-_TOKEN_WEIGHTS[config.token_weight](tokens, config).detach() * tokens.logp_BT)


@token_loss.register
def entropy(config: EntropyLoss, tokens: TokenBatch) -> TokenLoss:
    """-H(pi_theta): minimising it raises entropy."""
    return TokenLoss(-at_temperature(tokens, config).entropy_BT)


def at_temperature(tokens: TokenBatch, loss: LossConfig) -> TokenBatch:
    """The tokens under the distribution that `loss` is about: the sampled one, or that of temperature 1."""
    if not is_untempered(loss):
        return tokens
    return replace(tokens, logp_BT=tokens.untempered_logp_BT, entropy_BT=tokens.untempered_entropy_BT)


@token_loss.register
def kl(config: KLLoss, tokens: TokenBatch) -> TokenLoss:
    """Estimators of KL(pi_theta || q) from one sample: k1 log(p/q), k2 log(p/q)^2 / 2, k3 q/p - 1 - log(q/p)."""
    log_ratio_BT = tokens.logp_BT - _ANCHORS[config.against](tokens)
    log_ratio_BT = log_ratio_BT.clamp(-_MAX_ABS_LOG_RATIO, _MAX_ABS_LOG_RATIO)
    return TokenLoss(_KL_ESTIMATORS[config.estimator](log_ratio_BT))


@token_loss.register
def distillation(config: DistillationLoss, tokens: TokenBatch) -> TokenLoss:
    """-(log q - log mu) p / mu, q the teacher, mu the sampler: the reverse KL of a token as a policy gradient."""
    ratio_BT = bounded_exp(tokens.logp_BT - logp_sampler(tokens))
    return TokenLoss(log_sampler_over_teacher(tokens).clamp(-_MAX_ABS_LOG_RATIO, _MAX_ABS_LOG_RATIO) * ratio_BT)


def log_sampler_over_teacher(tokens: TokenBatch) -> Tensor:
    """`(B, T)` log(mu / q): on the sampler's own tokens, an unbiased estimate of KL(mu || q)."""
    return logp_sampler(tokens) - tokens.logp_teacher_BT


@token_loss.register
def divergence(config: DivergenceLoss, tokens: TokenBatch) -> TokenLoss:
    """Between the policy's p and the teacher's q over the choices: a lower bound of that over the vocabulary, since all
    other tokens count as one (data processing inequality), and equal to it where all tokens are choices."""
    kept = slice(None) if config.rest == "bucket" else slice(-1)
    logp, logq = tokens.logp_BTC[..., kept], tokens.logq_BTC[..., kept]
    if config.measure == "jsd":
        # GKD (arXiv 2306.13649), section 2; the mixture is m = beta q + (1 - beta) p.
        logm = torch.logaddexp(logq + math.log(config.beta), logp + math.log1p(-config.beta))
        return TokenLoss(config.beta * _kl_sum(logq, logm) + (1 - config.beta) * _kl_sum(logp, logm))
    return TokenLoss(_kl_sum(logq, logp) if config.measure == "forward_kl" else _kl_sum(logp, logq))


def _kl_sum(logp: Tensor, logq: Tensor) -> Tensor:
    """sum_c p (log p - log q) over the last dimension."""
    return (logp.exp() * (logp - logq)).sum(dim=-1)


@token_loss.register
def custom(config: CustomLoss, tokens: TokenBatch) -> TokenLoss:
    """The user's own; ConfigError where it fails or reads what its term does not name in `reads`."""
    return TokenLoss(called(config.function, "loss", _Named(tokens, config), config.options, tokens.logp_BT.shape))


class _Named:
    """The tensors of a batch that a custom loss has named: the others may hold no values."""

    def __init__(self, tokens: TokenBatch, config: CustomLoss) -> None:
        self._tokens, self._config = tokens, config

    def __getattr__(self, name: str) -> Tensor:
        missing = [what for what in _READ_AS.get(name, ()) if what not in self._config.reads]
        if missing:
            raise ConfigError(f"loss: {self._config.function} reads {name}; add {missing[0]} to loss.reads")
        found: Tensor = getattr(self._tokens, name)
        return found


_READ_AS: dict[str, tuple[CustomInput, ...]] = {
    "advantage_BT": ("advantage",),
    "entropy_BT": ("entropy",),
    "untempered_logp_BT": ("temperature_one",),
    "untempered_entropy_BT": ("temperature_one", "entropy"),
    "logp_ref_BT": ("reference",),
    "logp_teacher_BT": ("teacher",),
    "logp_behavior_BT": ("sampler",),
    "sequence_BT": ("sequence",),
}


_DIFFERENTIATED = ("logp_BT", "entropy_BT", "untempered_logp_BT", "untempered_entropy_BT")


def check_custom(terms: Sequence[TermConfig]) -> None:
    """Call every custom loss on a small batch; ConfigError for one that cannot be used, before anything is sampled."""
    for term in terms:
        if isinstance(term.loss, CustomLoss):
            zeros_BT = torch.zeros(2, 3)
            score_BT = (zeros_BT - 1.0).requires_grad_()
            batch = {each.name: score_BT if each.name in _DIFFERENTIATED else zeros_BT for each in fields(TokenBatch)}
            batch |= {"sequence_BT": zeros_BT.long(), "selected_BT": zeros_BT == 0}
            try:
                loss_BT = token_loss(term.loss, TokenBatch(**batch)).loss_BT
            except ConfigError as error:
                raise ConfigError(f"objective.terms.{term.name}.{error}") from error.__cause__
            if not loss_BT.requires_grad:
                raise ConfigError(
                    f"objective.terms.{term.name}.loss: the loss that {term.loss.function} returns has no gradient; "
                    "compute it from logp_BT"
                )


def _clipped_minimum(ratio_BT: Tensor, advantage_BT: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """min(A r, A clip(r)), and where it is the clipped branch: r moved in the direction of A, and too far."""
    minimum_BT = torch.minimum(advantage_BT * ratio_BT, advantage_BT * ratio_BT.clamp(1 - low, 1 + high))
    return minimum_BT, ((ratio_BT > 1 + high) & (advantage_BT > 0)) | ((ratio_BT < 1 - low) & (advantage_BT < 0))


def logp_sampler(tokens: TokenBatch) -> Tensor:
    """Log-probabilities under the sampler; where unknown, under the policy at the start of the phase."""
    return torch.where(tokens.logp_behavior_BT.isnan(), tokens.logp_old_BT, tokens.logp_behavior_BT)


def _row_entropy(tokens: TokenBatch) -> Tensor:
    return sequence_mean(tokens.entropy_BT.detach(), tokens.selected_BT, tokens.sequence_BT)


_TOKEN_WEIGHTS: dict[TokenWeight, Callable[[TokenBatch, NegativeLogLikelihoodLoss], Tensor]] = {
    "one": lambda tokens, _: torch.ones_like(tokens.logp_BT),
    "probability": lambda tokens, _: tokens.logp_BT.exp(),
    "p_one_minus_p": lambda tokens, _: tokens.logp_BT.exp() * (1 - tokens.logp_BT.exp()),
    "trust_region": lambda tokens, config: (tokens.logp_BT.exp() / config.floor).clamp(max=1.0),
    "exp_entropy": lambda tokens, _: _row_entropy(tokens).exp(),
    "exp_minus_entropy": lambda tokens, _: (-_row_entropy(tokens)).exp(),
}
_KL_ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {
    "k1": lambda log_ratio_BT: log_ratio_BT,
    "k2": lambda log_ratio_BT: 0.5 * log_ratio_BT.square(),
    "k3": lambda log_ratio_BT: torch.expm1(-log_ratio_BT) + log_ratio_BT,
}
_ANCHORS: dict[str, Callable[[TokenBatch], Tensor]] = {
    "reference": lambda tokens: tokens.logp_ref_BT,
    "old": lambda tokens: tokens.logp_old_BT,
    "behavior": logp_sampler,
    "teacher": lambda tokens: tokens.logp_teacher_BT,
}


_MAX_LOG_RATIO = 20.0
"""A ratio above e^20 means that two models disagree beyond use; its gradient is 0 instead of an overflow."""


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """exp(log_ratio), constant above e^20."""
    return log_ratio.clamp(max=_MAX_LOG_RATIO).exp()


def sequence_sum(value_BT: Tensor, sequence_BT: Tensor) -> Tensor:
    """`(B, T)`: at each token, the sum of `value_BT` over the tokens of its sequence, numbered as in `TokenBatch`.

    Micro-batches never cut a sequence, so the sum is whole whatever they are. There are at most as many sequences as
    tokens: a GPU need not count them first.
    """
    total_S = value_BT.new_zeros(value_BT.numel()).index_add(0, sequence_BT.flatten(), value_BT.flatten())
    return total_S[sequence_BT]


def sequence_mean(value_BT: Tensor, selected_BT: Tensor, sequence_BT: Tensor) -> Tensor:
    """`(B, T)`: at each token, the mean of `value_BT` over the selected tokens of its sequence; 0 without any."""
    count_BT = sequence_sum(selected_BT.to(value_BT.dtype), sequence_BT)
    return sequence_sum(torch.where(selected_BT, value_BT, 0.0), sequence_BT) / count_BT.clamp(min=1)


@singledispatch
def shape(config: ShapingConfig, log_rho: Tensor) -> Tensor:
    """f(rho) of policy shaping, a transform of the off-policy importance ratio (LUFFY, arXiv 2504.14945, eq. 6 and 7).

    `log_rho = log(pi_theta / pi_phi)` has any shape, and f(rho) the same. With surrogate -A f(rho), the coefficient on
    grad log pi_theta is `A rho f'(rho)`.
    """
    raise NotImplementedError(f"no shaping for {type(config).__name__}")


@shape.register
def rational(config: RationalShaping, log_rho: Tensor) -> Tensor:
    """f(x) = x / (x + gamma); the gradient coefficient x gamma / (x + gamma)^2 peaks with 1/4 at x = gamma.

    Written as sigmoid(log x - log gamma), which neither overflows for large ratios nor underflows for small ones.
    """
    return torch.sigmoid(log_rho - math.log(config.gamma))


@shape.register
def identity(config: IdentityShaping, log_rho: Tensor) -> Tensor:
    """f(x) = x."""
    return bounded_exp(log_rho)


@shape.register
def log(config: LogShaping, log_rho: Tensor) -> Tensor:
    """f(x) = log x."""
    return log_rho


@shape.register
def power(config: PowerShaping, log_rho: Tensor) -> Tensor:
    """f(x) = x^exponent."""
    return bounded_exp(config.exponent * log_rho)


@shape.register
def linear_log(config: LinearLogShaping, log_rho: Tensor) -> Tensor:
    """f(x) = x + weight log x."""
    return bounded_exp(log_rho) + config.weight * log_rho

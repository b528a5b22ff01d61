"""Per-token losses of a term. Each class names its formula; `luffy.objectives.losses` has a function of each kind.

Symbols: A advantage, p = pi_theta, r = pi_theta / pi_old, mu the policy that sampled the token, rho = pi_theta / pi_phi
with pi_phi the demonstration's author (1 where unknown), sg(x) = x without gradient, H entropy.
"""

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, model_validator

from luffy.config.objective.shaping import ShapingConfig
from luffy.config.strict import StrictModel

_Fraction = Annotated[float, Field(gt=0.0, lt=1.0)]


class SurrogateLoss(StrictModel):
    """Unclipped surrogate: -A r, with r = exp(logp - logp_old)."""

    kind: Literal["surrogate"]

    def formula(self) -> str:
        return "-A r"


class ClippedSurrogateLoss(StrictModel):
    """PPO: -min(A r, A clip(r, 1 - clip_low, 1 + clip_high)); clip_high above clip_low is DAPO's clip-higher."""

    kind: Literal["clipped_surrogate"]
    clip_low: _Fraction = 0.2
    clip_high: PositiveFloat = 0.2
    dual_clip: Annotated[float, Field(gt=1.0)] | None = None
    """Bound c on r where A < 0: the loss is then at most -A c (dual-clip PPO, arXiv 1912.09729, eq. 5)."""

    @model_validator(mode="after")
    def _effective(self) -> "ClippedSurrogateLoss":
        if self.dual_clip is not None and self.dual_clip <= 1 + self.clip_high:
            raise ValueError(f"dual_clip {self.dual_clip} must be above 1 + clip_high {1 + self.clip_high:g}")
        return self

    def formula(self) -> str:
        clipped = f"min(A r, A clip(r, {1 - self.clip_low:g}, {1 + self.clip_high:g}))"
        return f"-{clipped}" + ("" if self.dual_clip is None else f", at most -{self.dual_clip:g} A where A < 0")


class SequenceSurrogateLoss(StrictModel):
    """GSPO (arXiv 2507.18071, eq. 5 to 7): the ratio of a sequence is the geometric mean of its tokens' ratios."""

    kind: Literal["sequence_surrogate"]
    clip_low: _Fraction = 3e-4
    clip_high: PositiveFloat = 4e-4

    def formula(self) -> str:
        return f"-min(A s, A clip(s, {1 - self.clip_low:g}, {1 + self.clip_high:g})), s = exp(mean_t log r_t)"


class CispoLoss(StrictModel):
    """CISPO (MiniMax-M1, arXiv 2506.13585, eq. 4 and 5): a clipped weight without gradient; no token is dropped."""

    kind: Literal["cispo"]
    clip_low: _Fraction | None = None
    """Lower bound 1 - clip_low of the weight; None: no lower bound, as the paper trains."""
    clip_high: PositiveFloat = 4.0

    def formula(self) -> str:
        low = 0.0 if self.clip_low is None else 1 - self.clip_low
        return f"-sg(clip(r, {low:g}, {1 + self.clip_high:g})) A log p"


class AipoLoss(StrictModel):
    """AIPO (LlamaRL, arXiv 2505.24034): one-sided truncation of pi_theta / mu, a weight without gradient."""

    kind: Literal["aipo"]
    max_ratio: PositiveFloat = 4.0

    def formula(self) -> str:
        return f"-sg(min(p / mu, {self.max_ratio:g})) A log p"


class TotalVariationMaskedLoss(StrictModel):
    """DPPO (arXiv 2602.04879), binary total variation: drops tokens that moved too far from mu in A's direction."""

    kind: Literal["tv_masked_surrogate"]
    max_increase: _Fraction = 0.2
    """Left out where A > 0 and p - mu is above it."""
    max_decrease: _Fraction = 0.2
    """Left out where A <= 0 and mu - p is above it."""

    def formula(self) -> str:
        return (
            f"-A p / mu, without tokens where p - mu > {self.max_increase:g} (A > 0) "
            f"or mu - p > {self.max_decrease:g} (A <= 0)"
        )


class ShapedSurrogateLoss(StrictModel):
    """Off-policy surrogate with policy shaping (LUFFY, arXiv 2504.14945, eq. 6): -A f(rho), rho = pi_theta / pi_phi."""

    kind: Literal["shaped_surrogate"]
    shaping: ShapingConfig
    behavior: Literal["recorded", "one"] = "one"
    """pi_phi. `one`: 1 everywhere, as the LUFFY paper trains, whatever the data holds. `recorded`: by the data's
    log-probabilities, 1 where there are none; replayed rows always have theirs."""
    min_weight: float | None = None
    """Lower clamp of f(rho); a token below it has no gradient."""
    max_weight: float | None = None
    """Upper clamp of f(rho); a token above it has no gradient."""

    @model_validator(mode="after")
    def _ordered(self) -> "ShapedSurrogateLoss":
        if self.min_weight is not None and self.max_weight is not None and self.min_weight >= self.max_weight:
            raise ValueError(f"min_weight {self.min_weight} must be below max_weight {self.max_weight}")
        low, high = self.shaping.codomain
        if (self.min_weight is not None and self.min_weight >= high) or (
            self.max_weight is not None and self.max_weight <= low
        ):
            raise ValueError(f"f lies between {low:g} and {high:g}: with these clamps no token has a gradient")
        if self.min_weight is not None and self.min_weight <= low:
            raise ValueError(f"min_weight {self.min_weight} has no effect: f is always above {low:g}")
        if self.max_weight is not None and self.max_weight >= high:
            raise ValueError(f"max_weight {self.max_weight} has no effect: f is always below {high:g}")
        return self

    def formula(self) -> str:
        bounds = (self.min_weight, self.max_weight)
        shaped = self.shaping.formula()
        if any(bound is not None for bound in bounds):
            low, high = (
                "-inf" if bounds[0] is None else f"{bounds[0]:g}",
                "inf" if bounds[1] is None else f"{bounds[1]:g}",
            )
            shaped = f"clip({shaped}, {low}, {high})"
        return f"-A {shaped}" + (", pi_phi = 1" if self.behavior == "one" else "")


class MultipleImportanceLoss(StrictModel):
    """RL-PLUS (arXiv 2508.00222): multiple importance sampling with an exploration-weighted advantage.

    The unknown author is estimated as the mean of pi_old and the uniform bound 1, and the denominator is the mixture of
    pi_old and that estimate. Rare but right tokens weigh more by (1 - sg(p))^exploration_exponent.
    """

    kind: Literal["multiple_importance"]
    exploration_exponent: NonNegativeFloat = 0.5

    def formula(self) -> str:
        return f"-A (1 - sg(p))^{self.exploration_exponent:g} 2 p / (pi_old + (pi_old + 1) / 2)"


Temperature = Literal["one", "rollout"]
"""At which temperature a loss sees the policy: 1, the model's own distribution, or `rl.temperature`, the distribution
that rollouts are sampled from. Equal where `rl.temperature` is 1."""

TokenWeight = Literal["one", "probability", "p_one_minus_p", "exp_entropy", "exp_minus_entropy"]
_WEIGHT_FORMULAS: dict[TokenWeight, str] = {
    "one": "",
    "probability": "sg(p) ",
    "p_one_minus_p": "sg(p (1 - p)) ",
    "exp_entropy": "sg(exp(H)) ",
    "exp_minus_entropy": "sg(exp(-H)) ",
}


class NegativeLogLikelihoodLoss(StrictModel):
    """-w log p: supervised learning; the weight w has no gradient."""

    kind: Literal["nll"]
    temperature: Temperature = "one"
    """Temperature of p, and of H in the weights. `rollout` is for terms on rollouts, and for implementations based on
    verl, which compute one log-probability for all terms."""
    token_weight: TokenWeight = "one"  # noqa: S105 - a token of text
    """`probability`: DFT (arXiv 2508.05629); `p_one_minus_p`: CHORD-phi (2508.11408); `exp_entropy` and
    `exp_minus_entropy`: SRFT (2506.19767), H the mean entropy of the row's selected tokens."""

    def formula(self) -> str:
        return f"-{_WEIGHT_FORMULAS[self.token_weight]}log p{_at(self.temperature)}"


class EntropyLoss(StrictModel):
    """-H(pi_theta): a bonus for entropy."""

    kind: Literal["entropy"]
    temperature: Temperature = "rollout"

    def formula(self) -> str:
        return f"-H{_at(self.temperature)}"


def _at(temperature: Temperature) -> str:
    return ", at temperature 1" if temperature == "one" else ""


_KL_FORMULAS = {"k1": "log p - log q", "k2": "(log p - log q)^2 / 2", "k3": "q / p - 1 - log(q / p)"}
_ANCHORS = {"reference": "the reference policy", "old": "pi_old", "behavior": "mu"}


class KLLoss(StrictModel):
    """Divergence of the policy from another, by Schulman's estimators k1, k2 or k3 on the sampled tokens.

    In expectation, the gradient of k2 is that of the reverse KL, the gradient of k3 that of the forward KL, and the
    gradient of k1 vanishes.
    """

    kind: Literal["kl"]
    estimator: Literal["k1", "k2", "k3"]
    against: Literal["reference", "old", "behavior"] = "reference"
    """q: the policy this stage started from, which `rl.reference` may let follow the policy; the policy before this RL
    step's updates; the token's sampler."""

    def formula(self) -> str:
        return f"{_KL_FORMULAS[self.estimator]}, q = {_ANCHORS[self.against]}"


class DistillationLoss(StrictModel):
    """On-policy distillation: a policy gradient whose advantage at each token is log q - log mu, q the teacher.

    Where mu is the policy, its expected gradient is that of the reverse KL, KL(pi_theta || q), of each token in its
    context, later tokens left out (Thinking Machines Lab, "On-Policy Distillation", 2025; GKD, arXiv 2306.13649, and
    MiniLLM, arXiv 2306.08543, minimise the same divergence). q is taken at the temperature of the rollouts, as mu is.
    """

    kind: Literal["distillation"]

    def formula(self) -> str:
        return "-(log q - log mu) p / mu, q = the teacher of rl.teacher"


OnPolicySurrogate = (
    SurrogateLoss | ClippedSurrogateLoss | SequenceSurrogateLoss | CispoLoss | AipoLoss | TotalVariationMaskedLoss
)
OffPolicySurrogate = ShapedSurrogateLoss | MultipleImportanceLoss
AuxiliaryLoss = NegativeLogLikelihoodLoss | EntropyLoss | KLLoss | DistillationLoss
PolicyGradientLoss = OnPolicySurrogate | OffPolicySurrogate
"""Losses that weigh a token by its advantage; together they share the joint denominator."""
BehaviorLoss = AipoLoss | TotalVariationMaskedLoss | DistillationLoss
"""Losses whose ratio is against the sampler, so that they correct for it by themselves."""


def is_untempered(loss: object) -> bool:
    """Whether a loss sees the policy at temperature 1, whatever the rollouts' temperature is."""
    return isinstance(loss, NegativeLogLikelihoodLoss | EntropyLoss) and loss.temperature == "one"


LossConfig = Annotated[PolicyGradientLoss | AuxiliaryLoss, Field(discriminator="kind")]

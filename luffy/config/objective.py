"""An objective is a list of terms behind a group and an advantage estimator (DESIGN: "The objective")."""

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from luffy.config.strict import StrictModel


class RationalShaping(StrictModel):
    """f(x) = x / (x + gamma), LUFFY eq. 6."""

    kind: Literal["rational"]
    gamma: PositiveFloat = 0.1


class IdentityShaping(StrictModel):
    """f(x) = x: the bare importance ratio."""

    kind: Literal["identity"]


ShapingConfig = Annotated[RationalShaping | IdentityShaping, Field(discriminator="kind")]


class SurrogateLoss(StrictModel):
    """Unclipped surrogate: -A r, with r = exp(logp - logp_old)."""

    kind: Literal["surrogate"]


class ClippedSurrogateLoss(StrictModel):
    """PPO: -min(A r, A clip(r, 1 - clip_low, 1 + clip_high)); clip_high above clip_low is DAPO's clip-higher."""

    kind: Literal["clipped_surrogate"]
    clip_low: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.2
    clip_high: PositiveFloat = 0.2


class ShapedSurrogateLoss(StrictModel):
    """Off-policy surrogate with policy shaping: -A f(rho), rho = pi_theta / pi_phi, pi_phi = 1 where unknown."""

    kind: Literal["shaped_surrogate"]
    shaping: ShapingConfig


class NegativeLogLikelihoodLoss(StrictModel):
    """-logp: supervised learning on demonstrations."""

    kind: Literal["nll"]


class EntropyLoss(StrictModel):
    """-H(pi_theta): a bonus for entropy."""

    kind: Literal["entropy"]


LossConfig = Annotated[
    SurrogateLoss | ClippedSurrogateLoss | ShapedSurrogateLoss | NegativeLogLikelihoodLoss | EntropyLoss,
    Field(discriminator="kind"),
]

POLICY_GRADIENT_LOSSES = (SurrogateLoss, ClippedSurrogateLoss, ShapedSurrogateLoss)
"""Losses that weigh a token by its advantage; together they share the joint denominator."""

Selector = Literal["on_policy", "off_policy", "response"]
NormaliserMode = Literal["token", "sequence", "constant"]
Population = Literal["joint", "own"]


class NormaliserConfig(StrictModel):
    """The denominator of a term, counted over the whole optimizer step: all micro-batches, all ranks."""

    mode: NormaliserMode
    """`token`: number of tokens; `sequence`: mean over sequences of each one's token mean; `constant`: number of
    sequences x `rl.max_response_tokens` (Dr.GRPO)."""
    population: Population
    """`joint`: the tokens of all policy-gradient terms together (LUFFY eq. 5); `own`: the term's own."""


class TermConfig(StrictModel):
    """One summand of the objective: coefficient x sum over selected tokens of loss / denominator."""

    name: str
    """Names the term in metrics and in `--explain`."""
    select: Selector
    loss: LossConfig
    coefficient: float = 1.0
    normaliser: NormaliserConfig

    @property
    def is_policy_gradient(self) -> bool:
        return isinstance(self.loss, POLICY_GRADIENT_LOSSES)

    @model_validator(mode="after")
    def _consistent(self) -> "TermConfig":
        if not self.is_policy_gradient and self.normaliser.population == "joint":
            raise ValueError(f"term {self.name!r}: an auxiliary term counts its own rows; set population: own")
        if isinstance(self.loss, ShapedSurrogateLoss) and self.select != "off_policy":
            raise ValueError(f"term {self.name!r}: shaping is for off-policy tokens; set select: off_policy")
        if isinstance(self.loss, SurrogateLoss | ClippedSurrogateLoss) and self.select != "on_policy":
            raise ValueError(f"term {self.name!r}: {self.loss.kind} is for on-policy tokens; set select: on_policy")
        return self


class GroupConfig(StrictModel):
    """The rows of one prompt in one RL step."""

    size: PositiveInt
    """Rows a group, on- and off-policy together: the budget that comparisons keep equal."""
    off_policy: Annotated[int, Field(ge=0)]
    """How many of them are demonstrations; a prompt with fewer traces is topped up with rollouts."""

    @model_validator(mode="after")
    def _leaves_rollouts(self) -> "GroupConfig":
        if self.off_policy >= self.size:
            raise ValueError(f"off_policy {self.off_policy} must be below size {self.size}: RL needs rollouts")
        return self


class AdvantageConfig(StrictModel):
    """Group advantage A_i = R_i - mean(R), optionally divided by the group's standard deviation."""

    population: Literal["joint", "on_policy"]
    """Whose rewards make the baseline. `on_policy`: demonstrations stand outside, with advantage 0 (they can then
    only be learned from by an auxiliary term)."""
    scale_by_std: bool
    """GRPO divides by the (unbiased) standard deviation; LUFFY and Dr.GRPO do not."""


def _check_terms(terms: tuple[TermConfig, ...]) -> None:
    names = [term.name for term in terms]
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise ValueError(f"terms named twice: {', '.join(repeated)}; give each its own name")
    joint_modes = {term.normaliser.mode for term in terms if term.normaliser.population == "joint"}
    if len(joint_modes) > 1:
        raise ValueError(f"terms that share the joint denominator name different modes {sorted(joint_modes)}; use one")


class ObjectiveConfig(StrictModel):
    """What an RL step minimises; see `exp_configs/methods/` for the published ones."""

    group: GroupConfig
    advantage: AdvantageConfig
    terms: tuple[TermConfig, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _consistent(self) -> "ObjectiveConfig":
        _check_terms(self.terms)
        uses_off_policy = any(term.select == "off_policy" for term in self.terms)
        if uses_off_policy and self.group.off_policy == 0:
            raise ValueError("a term selects off_policy tokens but group.off_policy is 0: it would have no effect")
        if self.group.off_policy and not uses_off_policy:
            raise ValueError("group.off_policy is above 0 but no term selects off_policy tokens; set it to 0")
        shaped = any(isinstance(term.loss, ShapedSurrogateLoss) for term in self.terms)
        if shaped and self.advantage.population == "on_policy":
            raise ValueError(
                "advantage.population: on_policy gives demonstrations advantage 0, so a shaped_surrogate term would "
                "have no effect; set population: joint"
            )
        return self


class SupervisedObjectiveConfig(StrictModel):
    """What an SFT step minimises: terms over demonstrations."""

    terms: tuple[TermConfig, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _consistent(self) -> "SupervisedObjectiveConfig":
        _check_terms(self.terms)
        wrong = [term.name for term in self.terms if term.is_policy_gradient or term.select == "on_policy"]
        if wrong:
            raise ValueError(f"terms {', '.join(wrong)}: SFT has neither rollouts nor rewards; use nll or entropy")
        if any(term.normaliser.mode == "constant" for term in self.terms):
            raise ValueError("normaliser mode constant divides by rl.max_response_tokens; in SFT use token or sequence")
        return self

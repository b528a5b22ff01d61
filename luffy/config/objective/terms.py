"""A term of the objective: its tokens, its loss, its coefficient and its denominator."""

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, model_validator

from luffy.config.objective.losses import (
    BehaviorLoss,
    EntropyLoss,
    KLLoss,
    LossConfig,
    NegativeLogLikelihoodLoss,
    OffPolicySurrogate,
    PolicyGradientLoss,
    SequenceSurrogateLoss,
)
from luffy.config.objective.schedule import AdaptiveValue, Coefficient, ConstantValue, constant
from luffy.config.strict import StrictModel

Selector = Literal["on_policy", "off_policy", "response"]
NormaliserMode = Literal["token", "sequence", "constant"]
Population = Literal["joint", "own", "all"]
_Accuracy = Annotated[float, Field(ge=0.0, lt=1.0)]


class NormaliserConfig(StrictModel):
    """The denominator of a term, counted over the whole optimizer step: all micro-batches, all ranks."""

    mode: NormaliserMode
    """`token`: number of tokens; `sequence`: mean over sequences of each one's token mean; `constant`: number of
    sequences x `rl.max_response_tokens` (Dr.GRPO)."""
    population: Population
    """Whose tokens or sequences are counted. `joint`: those of all policy-gradient terms together (LUFFY eq. 5); `own`:
    the term's; `all`: every response, so that terms of any kind share one denominator."""
    before_gate: bool = False
    """Also count the rows that the gate excludes, so that a term shrinks with the share of rows that pass."""


class GateConfig(StrictModel):
    """Which rows a term learns from, by what the rollouts of their prompt achieved. All given conditions must hold."""

    group_accuracy_above: _Accuracy | None = None
    """Share of correct rollouts in the row's group is above this, without demonstrations and rows with a prefix."""
    group_accuracy_at_most: _Accuracy | None = None
    outcome: Literal["correct", "wrong"] | None = None
    """Outcome of the row itself; every row that did not earn the reward is `wrong`."""

    @model_validator(mode="after")
    def _effective(self) -> "GateConfig":
        above, at_most = self.group_accuracy_above, self.group_accuracy_at_most
        if above is None and at_most is None and self.outcome is None:
            raise ValueError("a gate without a condition has no effect; remove it")
        if above is not None and at_most is not None and above >= at_most:
            raise ValueError(f"no accuracy is above {above} and at most {at_most}")
        return self

    def formula(self) -> str:
        parts = []
        if self.group_accuracy_above is not None:
            parts.append(f"accuracy of the group > {self.group_accuracy_above:g}")
        if self.group_accuracy_at_most is not None:
            parts.append(f"accuracy of the group <= {self.group_accuracy_at_most:g}")
        if self.outcome is not None:
            parts.append(f"the row is {self.outcome}")
        return " and ".join(parts)


class ImportanceCorrection(StrictModel):
    """Corrects for a sampler that was not exactly the trainer: a constant weight w = pi_old / mu on each token.

    Truncated importance sampling and its masked variant (IcePop); over sequences, w is the product of the tokens'
    ratios. Tokens whose mu is unknown keep weight 1.
    """

    level: Literal["token", "sequence"] = "token"
    kind: Literal["truncate", "mask"]
    """`truncate`: min(w, high); `mask`: w inside [low, high], 0 outside."""
    low: NonNegativeFloat = 0.0
    high: PositiveFloat = 2.0

    @model_validator(mode="after")
    def _effective(self) -> "ImportanceCorrection":
        if self.low >= self.high:
            raise ValueError(f"low {self.low} must be below high {self.high}")
        if self.kind == "truncate" and self.low:
            raise ValueError("low has no effect with kind: truncate; remove it or use kind: mask")
        return self

    def formula(self) -> str:
        ratio = "pi_old / mu" if self.level == "token" else "prod_t pi_old / mu"
        bound = (
            f"min(w, {self.high:g})" if self.kind == "truncate" else f"w if {self.low:g} <= w <= {self.high:g} else 0"
        )
        return f"{bound}, w = {ratio}"


class TermConfig(StrictModel):
    """One summand of the objective: coefficient x sum over selected tokens of loss / denominator."""

    name: str = Field(pattern=r"^[a-z][a-z0-9_]*$")
    """Names the term in metrics and in `luffy config --explain`."""
    select: Selector
    gate: GateConfig | None = None
    loss: LossConfig
    correction: ImportanceCorrection | None = None
    top_entropy_share: Annotated[float, Field(gt=0.0, lt=1.0)] | None = None
    """Learn only from this share of each row's selected tokens, those of the highest entropy (rounded up). The
    denominator counts them all."""
    coefficient: Coefficient = constant(1.0)
    normaliser: NormaliserConfig

    @property
    def is_policy_gradient(self) -> bool:
        return isinstance(self.loss, PolicyGradientLoss)

    @property
    def takes_sampler_for_trainer(self) -> bool:
        """Whether it treats rollouts as sampled by the trainer's weights of this step."""
        learns = self.is_policy_gradient or (self.gate is not None and self.gate.outcome is not None)
        corrected = self.correction is not None or isinstance(self.loss, BehaviorLoss)
        return learns and self.select != "off_policy" and not corrected

    @property
    def lacks_correction(self) -> bool:
        """Whether it supports a correction and has none."""
        return self.takes_sampler_for_trainer and self.select == "on_policy"

    @property
    def needs_whole_sequences(self) -> str | None:
        """The setting by which the tokens of a response depend on one another, beyond its length; None: they do not."""
        if isinstance(self.loss, SequenceSurrogateLoss):
            return "loss.kind: sequence_surrogate"
        if isinstance(self.loss, NegativeLogLikelihoodLoss) and self.loss.token_weight.startswith("exp_"):
            return f"loss.token_weight: {self.loss.token_weight}"
        if self.correction is not None and self.correction.level == "sequence":
            return "correction.level: sequence"
        return "top_entropy_share" if self.top_entropy_share is not None else None

    @property
    def may_select_off_policy(self) -> bool:
        return self.select != "on_policy"

    @model_validator(mode="after")
    def _consistent(self) -> "TermConfig":
        for complaint in self._complaints():
            raise ValueError(f"term {self.name!r}: {complaint}")
        return self

    def _complaints(self) -> Sequence[str]:
        found = []
        if not self.is_policy_gradient and self.normaliser.population == "joint":
            found.append("an auxiliary term has no part in the joint denominator; set population: own or all")
        if self.normaliser.before_gate and self.normaliser.population == "all":
            found.append("normaliser.before_gate has no effect with population: all, which counts every row; remove it")
        if self.normaliser.before_gate and self.gate is None and self.normaliser.population == "own":
            found.append("normaliser.before_gate has no effect without a gate; remove it")
        if isinstance(self.loss, OffPolicySurrogate) and self.select != "off_policy":
            found.append(f"{self.loss.kind} is for off-policy tokens; set select: off_policy")
        against_sampler = isinstance(self.loss, KLLoss) and self.loss.against == "behavior"
        if (isinstance(self.loss, BehaviorLoss) or against_sampler) and self.select != "on_policy":
            found.append(f"{self.loss.kind} needs the sampler's log-probabilities; set select: on_policy")
        if self.correction is not None and self.select != "on_policy":
            found.append("correction needs the sampler's log-probabilities; set select: on_policy or remove it")
        if self.correction is not None and isinstance(self.loss, BehaviorLoss):
            found.append(f"{self.loss.kind} already divides by the sampler's probability; remove correction")
        if isinstance(self.coefficient, ConstantValue) and self.coefficient.value == 0:
            found.append("coefficient 0 has no effect; remove the term")
        if isinstance(self.coefficient, AdaptiveValue) and not isinstance(self.loss, EntropyLoss):
            found.append("an adaptive coefficient is for the entropy loss; give a number or a schedule")
        return found


def check_terms(terms: tuple[TermConfig, ...]) -> None:
    """Raise ValueError where terms contradict one another."""
    names = [term.name for term in terms]
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise ValueError(f"terms named twice: {', '.join(repeated)}; give each its own name")
    joint = [term for term in terms if term.normaliser.population == "joint"]
    if len({term.normaliser.mode for term in joint}) > 1:
        modes = sorted({term.normaliser.mode for term in joint})
        raise ValueError(f"terms that share the joint denominator name different modes {modes}; use one")
    if len({term.normaliser.before_gate for term in joint}) > 1:
        raise ValueError("terms that share the joint denominator differ in before_gate; use one value")
    if any(term.normaliser.before_gate for term in joint) and not any(
        term.gate for term in terms if term.is_policy_gradient
    ):
        raise ValueError("normaliser.before_gate has no effect: no policy-gradient term has a gate; remove it")

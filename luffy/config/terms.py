"""The terms of an objective: their losses, shapings, coefficients and denominators.

Coefficients, and other numbers that change over a stage, are schedules. A plain number in YAML is a constant; shares
are of the stage's steps, so that a preset means the same for a run of 100 steps and one of 500.

Each loss names its formula; `luffy.objectives.losses` has a function of each kind. Symbols: A advantage, p = pi_theta,
r = pi_theta / pi_old, mu the policy that sampled the token, rho = pi_theta / pi_phi with pi_phi the demonstration's
author (1 where unknown), sg(x) = x without gradient, H entropy.
"""

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field, NonNegativeFloat, PositiveFloat, PositiveInt

from luffy.config.strict import Fraction, ImportPath, Name, PositiveShare, ShareBelowOne, StrictModel

_INFINITY = float("inf")


class Written(StrictModel):
    """A part of an objective with a formula, in which fields go by their names."""

    written: ClassVar[str]

    def formula(self) -> str:
        return self.written.format_map(dict(self))


class ConstantValue(Written):
    """The same at every step."""

    kind: Literal["constant"]
    value: float
    written: ClassVar[str] = "{value:g}"


class _MovingValue(Written):
    kind: str
    start: float
    end: float
    over: PositiveShare = 1.0
    """Share of the stage after which `end` is reached."""
    written: ClassVar[str] = "{start:g} -> {end:g} ({kind} over {over:.0%} of the steps)"

    def _complaints(self) -> Iterator[str]:
        if self.start == self.end:
            yield f"a schedule from {self.start} to {self.end} stays where it is; give just the number"


class LinearValue(_MovingValue):
    """From `start` to `end` in a straight line, then `end`."""

    kind: Literal["linear"]
    levels: Annotated[int, Field(ge=2)] | None = None
    """Windows of equal length, `start` to `end`. LUFFY's `linear_max` is {start: max, end: max / 10, levels: 10}."""

    def formula(self) -> str:
        stairs = f" in {self.levels} levels)" if self.levels else ")"
        return super().formula().removesuffix(")") + stairs


class CosineValue(_MovingValue):
    """From `start` to `end` along half a cosine, then `end`."""

    kind: Literal["cosine"]


class WarmupCosineValue(Written):
    """A straight line from `start` to `peak`, half a cosine from there to `end`, then `end` (CHORD's mu)."""

    kind: Literal["warmup_cosine"]
    start: float
    peak: float
    end: float
    warmup: PositiveShare
    """Share of the stage after which `peak` is reached."""
    decay: PositiveShare
    """Share of the stage between `peak` and `end`."""
    written: ClassVar[str] = (
        "{start:g} -> {peak:g} (linear over {warmup:.0%} of the steps) -> {end:g} (cosine over {decay:.0%})"
    )

    def _complaints(self) -> Iterator[str]:
        if self.warmup + self.decay > 1.0:
            yield f"warmup {self.warmup} and decay {self.decay} are together more than the whole stage"
        if self.start == self.peak == self.end:
            yield f"a schedule that is {self.peak} throughout stays where it is; give just the number"


def number_as_constant(value: object) -> object:
    """A plain number in a file, as the schedule that stays there."""
    return {"kind": "constant", "value": value} if type(value) in (int, float) else value


Schedule = ConstantValue | LinearValue | CosineValue | WarmupCosineValue
ScheduledValue = Annotated[Schedule, Field(discriminator="kind"), BeforeValidator(number_as_constant)]
"""A pure function of the step."""


def constant(value: float) -> ConstantValue:
    return ConstantValue(kind="constant", value=value)


def depends_on_length(value: Schedule) -> bool:
    """Whether the value at a step changes when the stage is made longer."""
    return not isinstance(value, ConstantValue)


def bounds(value: Schedule) -> tuple[float, float]:
    """Smallest and largest value the schedule takes."""
    if isinstance(value, ConstantValue):
        return value.value, value.value
    ends = [value.start, value.end] + ([value.peak] if isinstance(value, WarmupCosineValue) else [])
    return min(ends), max(ends)


class RationalShaping(Written):
    """f(x) = x / (x + gamma), LUFFY eq. 6."""

    kind: Literal["rational"]
    gamma: PositiveFloat = 0.1
    codomain: ClassVar[tuple[float, float]] = (0.0, 1.0)
    written: ClassVar[str] = "rho / (rho + {gamma:g})"


class IdentityShaping(Written):
    """f(x) = x: the bare importance ratio."""

    kind: Literal["identity"]
    codomain: ClassVar[tuple[float, float]] = (0.0, _INFINITY)
    written: ClassVar[str] = "rho"


class LogShaping(Written):
    """f(x) = log x: advantage-weighted supervised learning, every token with the same weight."""

    kind: Literal["log"]
    codomain: ClassVar[tuple[float, float]] = (-_INFINITY, _INFINITY)
    written: ClassVar[str] = "log rho"


class PowerShaping(Written):
    """f(x) = x^exponent; 0.5 is the square root."""

    kind: Literal["power"]
    exponent: PositiveFloat = 0.5
    codomain: ClassVar[tuple[float, float]] = (0.0, _INFINITY)
    written: ClassVar[str] = "rho^{exponent:g}"


class LinearLogShaping(Written):
    """f(x) = x + weight log x: `p_logp` of the authors' code."""

    kind: Literal["linear_log"]
    weight: PositiveFloat = 0.1
    codomain: ClassVar[tuple[float, float]] = (-_INFINITY, _INFINITY)
    written: ClassVar[str] = "(rho + {weight:g} log rho)"


ShapingConfig = Annotated[
    RationalShaping | IdentityShaping | LogShaping | PowerShaping | LinearLogShaping, Field(discriminator="kind")
]


class SurrogateLoss(Written):
    """Unclipped surrogate: -A r, with r = exp(logp - logp_old)."""

    kind: Literal["surrogate"]
    written: ClassVar[str] = "-A r"


class ClippedSurrogateLoss(StrictModel):
    """PPO: -min(A r, A clip(r, 1 - clip_low, 1 + clip_high)); clip_high above clip_low is DAPO's clip-higher."""

    kind: Literal["clipped_surrogate"]
    clip_low: Fraction = 0.2
    clip_high: PositiveFloat = 0.2
    dual_clip: Annotated[float, Field(gt=1.0)] | None = None
    """Bound c on r where A < 0: the loss is then at most -A c (dual-clip PPO, arXiv 1912.09729, eq. 5)."""

    def _complaints(self) -> Iterator[str]:
        if self.dual_clip is not None and self.dual_clip <= 1 + self.clip_high:
            yield f"dual_clip {self.dual_clip} must be above 1 + clip_high {1 + self.clip_high:g}"

    def formula(self) -> str:
        clipped = f"min(A r, A clip(r, {1 - self.clip_low:g}, {1 + self.clip_high:g}))"
        return f"-{clipped}" + ("" if self.dual_clip is None else f", at most -{self.dual_clip:g} A where A < 0")


class SequenceSurrogateLoss(StrictModel):
    """GSPO (arXiv 2507.18071, eq. 5 to 7): the ratio of a sequence is the geometric mean of its tokens' ratios."""

    kind: Literal["sequence_surrogate"]
    clip_low: Fraction = 3e-4
    clip_high: PositiveFloat = 4e-4

    def formula(self) -> str:
        return f"-min(A s, A clip(s, {1 - self.clip_low:g}, {1 + self.clip_high:g})), s = exp(mean_t log r_t)"


class CispoLoss(StrictModel):
    """CISPO (MiniMax-M1, arXiv 2506.13585, eq. 4 and 5): a clipped weight without gradient; no token is dropped."""

    kind: Literal["cispo"]
    clip_low: Fraction | None = None
    """Lower bound 1 - clip_low of the weight; None: no lower bound, as the paper trains."""
    clip_high: PositiveFloat = 4.0

    def formula(self) -> str:
        low = 0.0 if self.clip_low is None else 1 - self.clip_low
        return f"-sg(clip(r, {low:g}, {1 + self.clip_high:g})) A log p"


class AipoLoss(Written):
    """AIPO (LlamaRL, arXiv 2505.24034): one-sided truncation of pi_theta / mu, a weight without gradient."""

    kind: Literal["aipo"]
    max_ratio: PositiveFloat = 4.0
    written: ClassVar[str] = "-sg(min(p / mu, {max_ratio:g})) A log p"


class TotalVariationMaskedLoss(Written):
    """DPPO (arXiv 2602.04879), binary total variation: drops tokens that moved too far from mu in A's direction."""

    kind: Literal["tv_masked_surrogate"]
    max_increase: Fraction = 0.2
    """Left out where A > 0 and p - mu is above it."""
    max_decrease: Fraction = 0.2
    """Left out where A <= 0 and mu - p is above it."""
    written: ClassVar[str] = (
        "-A p / mu, without tokens where p - mu > {max_increase:g} (A > 0) or mu - p > {max_decrease:g} (A <= 0)"
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

    def _complaints(self) -> Iterator[str]:
        least, most = self._clamps
        if least >= most:
            yield f"min_weight {self.min_weight} must be below max_weight {self.max_weight}"
        low, high = self.shaping.codomain
        if least >= high or most <= low:
            yield f"f lies between {low:g} and {high:g}: with these clamps no token has a gradient"

    @property
    def _clamps(self) -> tuple[float, float]:
        low, high = self.min_weight, self.max_weight
        return -_INFINITY if low is None else low, _INFINITY if high is None else high

    def formula(self) -> str:
        shaped, (least, most) = self.shaping.formula(), self._clamps
        if (least, most) != (-_INFINITY, _INFINITY):
            shaped = f"clip({shaped}, {least:g}, {most:g})"
        return f"-A {shaped}" + (", pi_phi = 1" if self.behavior == "one" else "")


class MultipleImportanceLoss(Written):
    """RL-PLUS (arXiv 2508.00222): multiple importance sampling with an exploration-weighted advantage. The unknown
    author is estimated as the mean of pi_old and the uniform bound 1, and the denominator is the mixture of pi_old and
    that estimate. Rare but right tokens weigh more by (1 - sg(p))^exploration_exponent."""

    kind: Literal["multiple_importance"]
    exploration_exponent: NonNegativeFloat = 0.5
    written: ClassVar[str] = "-A (1 - sg(p))^{exploration_exponent:g} 2 p / (pi_old + (pi_old + 1) / 2)"


Temperature = Literal["one", "rollout"]
"""Temperature at which a loss sees the policy: 1, the model's own distribution, or `rl.temperature`, the rollouts'."""

TokenWeight = Literal["one", "probability", "p_one_minus_p", "trust_region", "exp_entropy", "exp_minus_entropy"]
_WEIGHT_FORMULAS: dict[TokenWeight, str] = {
    "one": "",
    "probability": "sg(p) ",
    "p_one_minus_p": "sg(p (1 - p)) ",
    "trust_region": "sg(min(1, p / {floor:g})) ",
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
    """`probability`: DFT (arXiv 2508.05629); `p_one_minus_p`: CHORD-phi (2508.11408); `trust_region`: 1 / p in the
    gradient of log p becomes 1 / max(p, floor) (TRAPO, 2512.17636); `exp_entropy` and `exp_minus_entropy`: SRFT
    (2506.19767), H the mean entropy of the row's selected tokens."""
    floor: Fraction = 0.1
    """Probability below which `trust_region` weighs a token less."""

    def formula(self) -> str:
        weight = _WEIGHT_FORMULAS[self.token_weight].format(floor=self.floor)
        return f"-{weight}log p{_at(self.temperature)}"

    def _complaints(self) -> Iterator[str]:
        if self.changed("floor") and self.token_weight != "trust_region":  # noqa: S105
            yield f"floor has no effect with token_weight: {self.token_weight}; remove it"


class EntropyLoss(StrictModel):
    """-H(pi_theta): a bonus for entropy."""

    kind: Literal["entropy"]
    temperature: Temperature = "rollout"

    def formula(self) -> str:
        return f"-H{_at(self.temperature)}"


def _at(temperature: Temperature) -> str:
    return ", at temperature 1" if temperature == "one" else ""


_KL_FORMULAS = {"k1": "log p - log q", "k2": "(log p - log q)^2 / 2", "k3": "q / p - 1 - log(q / p)"}
_ANCHORS = {"reference": "the reference policy", "old": "pi_old", "behavior": "mu", "teacher": "the row's teacher"}


class KLLoss(StrictModel):
    """Divergence of the policy from another, by Schulman's estimators k1, k2 or k3 on the sampled tokens. The expected
    gradient of k2 is that of the reverse KL, that of k3 of the forward KL, and that of k1 vanishes."""

    kind: Literal["kl"]
    estimator: Literal["k1", "k2", "k3"]
    against: Literal["reference", "old", "behavior", "teacher"] = "reference"
    """q: the policy that this stage started from (`rl.reference` may move it); that before the RL step; the sampler;
    the row's teacher of `rl.teachers`."""

    def formula(self) -> str:
        return f"{_KL_FORMULAS[self.estimator]}, q = {_ANCHORS[self.against]}"


class DistillationLoss(Written):
    """On-policy distillation: a policy gradient whose advantage at each token is log q - log mu, q the teacher. Where
    mu is the policy, its expected gradient is that of the reverse KL, KL(pi_theta || q), of each token in its context,
    later tokens left out (Thinking Machines Lab, "On-Policy Distillation", 2025; GKD, arXiv 2306.13649, and MiniLLM,
    arXiv 2306.08543, minimise it too). q is taken at the temperature of the rollouts, as mu is."""

    kind: Literal["distillation"]
    written: ClassVar[str] = "-(log q - log mu) p / mu, q = the row's teacher"


class DivergenceLoss(StrictModel):
    """Divergence of the policy's p from the teacher's q at each token (GKD, arXiv 2306.13649), over the `top_k` most
    probable tokens and all others together; gradient through p alone; at the rollouts' temperature."""

    kind: Literal["divergence"]
    measure: Literal["forward_kl", "reverse_kl", "jsd"]
    """KL(q || p), KL(p || q), or the generalised Jensen-Shannon divergence beta KL(q || m) + (1 - beta) KL(p || m) with
    m = beta q + (1 - beta) p."""
    beta: Fraction = 0.5
    """Weight of the teacher in m: near 0, the gradient is like that of forward_kl, near 1 like that of reverse_kl."""
    top_k: PositiveInt = 64
    """Tokens of the vocabulary that are compared one by one; all where there are fewer. The trainer holds 8 bytes for
    each of them at every token of an RL step, in CPU memory."""
    over: Literal["teacher", "policy", "both"] = "teacher"
    """Whose most probable tokens; the policy's are those before the RL step's updates. `both`: the teacher's `top_k`,
    then the first `top_k` of the policy's that are not among them."""
    rest: Literal["bucket", "ignored"] = "bucket"
    """All other tokens. `bucket`: they count as one more, which bounds the divergence over the vocabulary from below.
    `ignored`: the sums leave them out, so that they are no divergences and may be negative (verl)."""

    def formula(self) -> str:
        beta, others = self.beta, " and the rest as one" if self.rest == "bucket" else ""
        measure = {
            "forward_kl": "KL(q || p)",
            "reverse_kl": "KL(p || q)",
            "jsd": f"{beta:g} KL(q || m) + {1 - beta:g} KL(p || m), m = {beta:g} q + {1 - beta:g} p",
        }[self.measure]
        chosen = {"teacher": "q", "policy": "pi_old", "both": f"q, {self.top_k} more of pi_old"}[self.over]
        return f"{measure}, over the {self.top_k} most probable tokens of {chosen}{others}, q = the row's teacher"

    def _complaints(self) -> Iterator[str]:
        if self.changed("beta") and self.measure != "jsd":
            yield f"beta has no effect with measure: {self.measure}; remove it"


CustomInput = Literal["advantage", "entropy", "temperature_one", "reference", "teacher", "sampler", "sequence"]


class CustomLoss(StrictModel):
    """A loss of your own: `function(tokens, **options)`, from a `luffy.objectives.losses.TokenBatch` to a loss of shape
    `(B, T)`, in which each sampled token's entry depends on its own sequence alone."""

    kind: Literal["custom"]
    function: ImportPath
    """`package.module:function`, importable from the working directory or the environment. The module is part of the
    stage's key, with what it imports of the user's own."""
    reads: tuple[CustomInput, ...] = ("advantage",)
    """What the function reads besides `logp_BT`, `logp_old_BT` and `selected_BT`. `advantage`: the term is a policy
    gradient, and counts in the joint denominator. `entropy`: with gradient. `temperature_one`: `untempered_logp_BT` and
    `untempered_entropy_BT`. `reference`, `teacher`: log-probabilities that are computed only for terms that read them.
    `sampler`: `logp_behavior_BT`, NaN where unknown. `sequence`: which tokens belong together."""
    options: dict[str, int | float | bool | str | None] = Field(default={})
    """Keyword arguments of the function."""

    def formula(self) -> str:
        given = "".join(f", {name}={value}" for name, value in self.options.items())
        return f"{self.function}(log p, log pi_old{''.join(f', {name}' for name in self.reads)}{given})"


OnPolicySurrogate = (
    SurrogateLoss | ClippedSurrogateLoss | SequenceSurrogateLoss | CispoLoss | AipoLoss | TotalVariationMaskedLoss
)
OffPolicySurrogate = ShapedSurrogateLoss | MultipleImportanceLoss
AuxiliaryLoss = NegativeLogLikelihoodLoss | EntropyLoss | KLLoss | DistillationLoss | DivergenceLoss | CustomLoss
PolicyGradientLoss = OnPolicySurrogate | OffPolicySurrogate
"""Losses that weigh a token by its advantage; together they share the joint denominator."""
BehaviorLoss = AipoLoss | TotalVariationMaskedLoss | DistillationLoss
"""Losses whose ratio is against the sampler, so that they correct for it by themselves."""


def is_untempered(loss: object) -> bool:
    """Whether a loss sees the policy at temperature 1, whatever the rollouts' temperature is."""
    return isinstance(loss, NegativeLogLikelihoodLoss | EntropyLoss) and loss.temperature == "one"


def reads(loss: object, what: CustomInput) -> bool:
    """Whether a loss of the user's own reads such tensors."""
    return isinstance(loss, CustomLoss) and what in loss.reads


LossConfig = Annotated[PolicyGradientLoss | AuxiliaryLoss, Field(discriminator="kind")]


Selector = Literal["on_policy", "off_policy", "response"]


class NormaliserConfig(StrictModel):
    """The denominator of a term, counted over the whole optimizer step: all micro-batches, all ranks."""

    mode: Literal["token", "sequence", "constant"]
    """`token`: number of tokens; `sequence`: mean over sequences of each one's token mean; `constant`: number of
    sequences x `rl.max_response_tokens` (Dr.GRPO)."""
    population: Literal["joint", "own", "all"]
    """Whose tokens or sequences are counted. `joint`: those of all policy-gradient terms together (LUFFY eq. 5); `own`:
    the term's; `all`: every response, so that terms of any kind share one denominator."""
    before_gate: bool = False
    """Also count the rows that the gate excludes, so that a term shrinks with the share of rows that pass."""


class GateConfig(StrictModel):
    """Which rows a term learns from, by what the rollouts of their prompt achieved. All given conditions must hold."""

    group_accuracy_above: ShareBelowOne | None = None
    """Share of correct rollouts in the row's group is above this, without demonstrations and rows with a prefix."""
    group_accuracy_at_most: ShareBelowOne | None = None
    outcome: Literal["correct", "wrong"] | None = None
    """Outcome of the row itself; every row that did not earn the reward is `wrong`."""
    taught: bool | Name | None = None
    """A teacher of `rl.teachers` scores the row (true), none does (false), or the one of this name. A self-teacher that
    is shown another right row of the group does not teach a row without one."""

    def _complaints(self) -> Iterator[str]:
        above, at_most = self.group_accuracy_above, self.group_accuracy_at_most
        if above is not None and at_most is not None and above >= at_most:
            yield f"no accuracy is above {above} and at most {at_most}"

    def formula(self) -> str:
        conditions = {
            "accuracy of the group > {:g}": self.group_accuracy_above,
            "accuracy of the group <= {:g}": self.group_accuracy_at_most,
            "the row is {}": self.outcome,
            "the row has a teacher": self.taught is True or None,
            "the row has no teacher": self.taught is False or None,
            "the row's teacher is {}": self.taught if isinstance(self.taught, str) else None,
        }
        given = (text.format(value) for text, value in conditions.items() if value is not None)
        return " and ".join(given) or "all rows pass"


class ImportanceCorrection(StrictModel):
    """Corrects for a sampler that was not exactly the trainer: a constant weight w = pi_old / mu on each token.
    Truncated importance sampling and its masked variant (IcePop); over sequences, w is the product of the tokens'
    ratios. Tokens whose mu is unknown keep weight 1."""

    level: Literal["token", "sequence"] = "token"
    kind: Literal["truncate", "mask"]
    """`truncate`: min(w, high); `mask`: w inside [low, high], 0 outside."""
    low: NonNegativeFloat = 0.0
    high: PositiveFloat = 2.0

    def _complaints(self) -> Iterator[str]:
        if self.low >= self.high:
            yield f"low {self.low} must be below high {self.high}"
        if self.kind == "truncate" and self.low:
            yield "low has no effect with kind: truncate; remove it or use kind: mask"

    def formula(self) -> str:
        ratio = "pi_old / mu" if self.level == "token" else "prod_t pi_old / mu"
        masked = f"w if {self.low:g} <= w <= {self.high:g} else 0"
        return f"{masked if self.kind == 'mask' else f'min(w, {self.high:g})'}, w = {ratio}"


class EvidenceConfig(StrictModel):
    """RLSD (arXiv 2604.03128): a constant factor by which a teacher changes the size of a token's advantage, never its
    sign: larger where A > 0 and the teacher finds the token likelier than the policy, or A < 0 and less likely."""

    clip: PositiveShare = 0.2
    """Bound on how much the factor differs from 1."""
    reverse: bool = False
    """Larger where the policy found the token likelier than the teacher and A > 0: RLRT (arXiv 2605.10781)."""

    def formula(self) -> str:
        ratio = "pi_old / q" if self.reverse else "q / pi_old"
        return f"clip(({ratio})^sign(A), {1 - self.clip:g}, {1 + self.clip:g}), q = the row's teacher"


class WeighConfig(Written):
    """Constant weights of a term's tokens, with mean 1 over all of them in the optimizer step."""

    teacher_entropy: PositiveFloat
    """beta of exp(-beta H): tokens count less where the distribution of the row's teacher has a high entropy H (nats),
    as in SRPO (arXiv 2604.02288)."""
    written: ClassVar[str] = "w ~ exp(-{teacher_entropy:g} H(q)), with mean 1 over the term's tokens"


class TermConfig(StrictModel):
    """One summand of the objective: coefficient x sum over selected tokens of loss / denominator."""

    name: Name
    """Names the term in metrics and in `luffy config --explain`."""
    select: Selector
    gate: GateConfig | None = None
    loss: LossConfig
    correction: ImportanceCorrection | None = None
    evidence: EvidenceConfig | None = None
    weigh: WeighConfig | None = None
    top_entropy_share: Fraction | None = None
    """Learn only from this share (rounded up) of a row's tokens, by entropy; the denominator counts them all."""
    coefficient: ScheduledValue = constant(1.0)
    normaliser: NormaliserConfig

    @property
    def is_policy_gradient(self) -> bool:
        return isinstance(self.loss, PolicyGradientLoss) or reads(self.loss, "advantage")

    @property
    def needs_teacher(self) -> bool:
        """Whether it compares the policy with a teacher of `rl.teachers`."""
        compared = isinstance(self.loss, KLLoss) and self.loss.against == "teacher"
        taught = compared or isinstance(self.loss, DistillationLoss | DivergenceLoss) or reads(self.loss, "teacher")
        return taught or self.evidence is not None or self.weigh is not None

    @property
    def needs_entropy_gradient(self) -> bool:
        """Whether its loss differentiates the entropy, which otherwise is only measured."""
        return isinstance(self.loss, EntropyLoss) or reads(self.loss, "entropy")

    @property
    def is_untempered(self) -> bool:
        """Whether its loss sees the policy at temperature 1, whatever the rollouts' temperature is."""
        return is_untempered(self.loss) or reads(self.loss, "temperature_one")

    @property
    def takes_sampler_for_trainer(self) -> bool:
        """Whether it treats rollouts as sampled by the trainer's weights of this step."""
        learns = self.is_policy_gradient or (self.gate is not None and self.gate.outcome is not None)
        corrected = self.correction is not None or isinstance(self.loss, BehaviorLoss) or reads(self.loss, "sampler")
        return learns and self.select != "off_policy" and not corrected

    @property
    def lacks_correction(self) -> bool:
        return self.takes_sampler_for_trainer and self.select == "on_policy"

    @property
    def needs_whole_sequences(self) -> str | None:
        """The setting by which the tokens of a response depend on one another, beyond its length; None: they do not."""
        if isinstance(self.loss, SequenceSurrogateLoss):
            return "loss.kind: sequence_surrogate"
        if isinstance(self.loss, NegativeLogLikelihoodLoss) and self.loss.token_weight.startswith("exp_"):
            return f"loss.token_weight: {self.loss.token_weight}"
        if reads(self.loss, "sequence"):
            return "loss.reads: sequence"
        if self.correction is not None and self.correction.level == "sequence":
            return "correction.level: sequence"
        return "top_entropy_share" if self.top_entropy_share is not None else None

    def _complaints(self) -> Iterator[str]:
        return (f"term {self.name!r}: {complaint}" for complaint in self._own_complaints())

    def _own_complaints(self) -> Iterator[str]:
        if not self.is_policy_gradient and self.normaliser.population == "joint":
            yield "an auxiliary term has no part in the joint denominator; set population: own or all"
        if self.normaliser.before_gate and self.normaliser.population == "all":
            yield "normaliser.before_gate has no effect with population: all, which counts every row; remove it"
        if self.normaliser.before_gate and self.gate is None and self.normaliser.population == "own":
            yield "normaliser.before_gate has no effect without a gate; remove it"
        if isinstance(self.loss, OffPolicySurrogate) and self.select != "off_policy":
            yield f"{self.loss.kind} is for off-policy tokens; set select: off_policy"
        against_sampler = isinstance(self.loss, KLLoss) and self.loss.against == "behavior"
        if (isinstance(self.loss, BehaviorLoss) or against_sampler) and self.select != "on_policy":
            yield f"{self.loss.kind} needs the sampler's log-probabilities; set select: on_policy"
        if self.correction is not None and self.select != "on_policy":
            yield "correction needs the sampler's log-probabilities; set select: on_policy or remove it"
        if self.evidence is not None and not isinstance(self.loss, PolicyGradientLoss):
            yield f"evidence changes advantages, and {self.loss.kind} has none; remove it"
        if self.correction is not None and isinstance(self.loss, BehaviorLoss):
            yield f"{self.loss.kind} already divides by the sampler's probability; remove correction"
        if isinstance(self.coefficient, ConstantValue) and self.coefficient.value == 0:
            yield "coefficient 0 has no effect; remove the term"


def complaints_about(terms: tuple[TermConfig, ...]) -> Iterator[str]:
    """Where terms contradict one another."""
    names = [term.name for term in terms]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        yield f"terms named twice: {', '.join(repeated)}; give each its own name"
    divergences = [term.loss for term in terms if isinstance(term.loss, DivergenceLoss)]
    for field in ("top_k", "over"):
        chosen = sorted({str(getattr(divergence, field)) for divergence in divergences})
        if len(chosen) > 1:
            yield f"divergences name different {field} ({', '.join(chosen)}); use one"
    joint = [term.normaliser for term in terms if term.normaliser.population == "joint"]
    if len(modes := sorted({each.mode for each in joint})) > 1:
        yield f"terms that share the joint denominator name different modes {modes}; use one"
    before_gate = {each.before_gate for each in joint}
    if len(before_gate) > 1:
        yield "terms that share the joint denominator differ in before_gate; use one value"
    if True in before_gate and not any(term.gate for term in terms if term.is_policy_gradient):
        yield "normaliser.before_gate has no effect: no policy-gradient term has a gate; remove it"

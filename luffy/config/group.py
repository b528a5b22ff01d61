"""The rows of one prompt (rollouts, traces, prefix-conditioned and replayed rows), which groups are kept, and the
advantage of each row.

R_i is the reward of row i, |o_i| its number of response tokens, n the size of the population.
"""

import itertools
import re
from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from luffy.config.strict import StrictModel
from luffy.config.terms import ScheduledValue, bounds, depends_on_length


class _Advantage(StrictModel):
    """Options of every estimator."""

    off_policy_scale: NonNegativeFloat = 1.0
    """Multiplies the advantage of off-policy tokens (`prefix_reward_weight_alpha` of the LUFFY code)."""
    on_policy_scale: NonNegativeFloat = 1.0
    """Multiplies the advantage of on-policy tokens (`prefix_reward_weight_beta`)."""
    zero_truncated: bool = False
    """Rollouts that ran into the length limit get advantage 0 (they still count in the baseline)."""


class _GroupBaseline(_Advantage):
    population: Literal["joint", "on_policy"]
    """Rows whose rewards form the baseline. `on_policy`: demonstrations are left out and have advantage 0 (they can
    then only be learned from by an auxiliary term)."""


class GroupMeanAdvantage(_GroupBaseline):
    """GRPO (arXiv 2402.03300): A_i = R_i - mean(R); LUFFY (2504.14945, eq. 4): over rollouts and traces."""

    kind: Literal["group_mean"]
    scale_by_std: bool
    """GRPO divides by the (unbiased) standard deviation; LUFFY and Dr.GRPO (2503.20783) do not."""

    def formula(self) -> str:
        return "R_i - mean(R)" if not self.scale_by_std else "(R_i - mean(R)) / (std(R) + 1e-6)"


class LeaveOneOutAdvantage(_GroupBaseline):
    """RLOO (arXiv 2402.14740): the baseline of a row is the mean of the others; equals (R_i - mean(R)) n / (n - 1)."""

    kind: Literal["leave_one_out"]

    def formula(self) -> str:
        return "R_i - mean of the other rows' R"


class LengthWeightedAdvantage(_GroupBaseline):
    """OPO (arXiv 2505.23585): the variance-minimising baseline, the mean of R weighted by response length."""

    kind: Literal["length_weighted"]

    def formula(self) -> str:
        return "R_i - sum(|o| R) / sum(|o|)"


class PassAtKAdvantage(_GroupBaseline):
    """Pass@k training (arXiv 2508.10751): the analytic advantage when the reward is that of the best of k.

    As in the paper, a row is right or wrong; here it is right where its reward is above 0, so also with partial credit.
    """

    kind: Literal["pass_at_k"]
    k: Annotated[int, Field(ge=2)]

    def formula(self) -> str:
        return f"that of the best of {self.k}, over all subsets of the group"


class GlobalBatchAdvantage(_GroupBaseline):
    """REINFORCE++ (arXiv 2501.03262): normalised by mean and standard deviation over the tokens of the whole RL step (a
    row counts once for each of its tokens)."""

    kind: Literal["global_batch"]
    group_baseline: bool = False
    """Subtract the group's mean first (REINFORCE++-baseline)."""

    def formula(self) -> str:
        centred = "(R_i - mean over the group)" if self.group_baseline else "R_i"
        return f"({centred} - mean) / std, both over all tokens of the RL step"


class RawAdvantage(_Advantage):
    """REINFORCE without a baseline (Williams 1992): A_i = R_i, for rollouts and traces alike.

    A group whose rewards are all equal then has a gradient, unless they are all 0.
    """

    kind: Literal["raw"]
    population: ClassVar[Literal["joint"]] = "joint"
    """Without a baseline, all rows are treated alike."""

    def formula(self) -> str:
        return "R_i"


class NoAdvantage(_Advantage):
    """A_i = 0: no term uses the rewards, which are measured all the same (pure distillation)."""

    kind: Literal["none"]
    population: ClassVar[Literal["joint"]] = "joint"

    def formula(self) -> str:
        return "0"


class GeneralizedAdvantage(_Advantage):
    """GAE (arXiv 1506.02438) with the critic of `rl.critic`; the reward falls on the last token."""

    kind: Literal["gae"]
    gamma: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    lam: Annotated[float, Field(ge=0.0, le=1.0)] = 0.95
    whiten: bool = True
    """Mean 0 and standard deviation 1 over the tokens of the RL step."""

    def formula(self) -> str:
        whitened = ", whitened over the batch" if self.whiten else ""
        return f"sum_l ({self.gamma:g} x {self.lam:g})^l (r_t+l + {self.gamma:g} V_t+l+1 - V_t+l){whitened}"


AdvantageConfig = Annotated[
    GroupMeanAdvantage
    | LeaveOneOutAdvantage
    | LengthWeightedAdvantage
    | PassAtKAdvantage
    | GlobalBatchAdvantage
    | RawAdvantage
    | NoAdvantage
    | GeneralizedAdvantage,
    Field(discriminator="kind"),
]
GroupAdvantage = (
    GroupMeanAdvantage
    | LeaveOneOutAdvantage
    | LengthWeightedAdvantage
    | PassAtKAdvantage
    | GlobalBatchAdvantage
    | RawAdvantage
    | NoAdvantage
)
"""Estimators that give each row one number."""
_Accuracy = Annotated[float, Field(ge=0.0, lt=1.0)]
_HintShare = Annotated[float, Field(gt=0.0, lt=1.0)]


class UniformLength(StrictModel):
    """Share of the trace ~ U(low, high), both of which may move over the run.

    LUFFY's strategies: `random` is low 0 and high 1; `linear` has low = high falling to 0; `linear_max` is low 0 and
    high falling in ten levels; `reverse_linear` rises instead. Prefix-RFT (arXiv 2507.01679) lets low fall.
    """

    kind: Literal["uniform"]
    low: ScheduledValue
    high: ScheduledValue

    @model_validator(mode="after")
    def _shares(self) -> "UniformLength":
        _check_share("low", self.low)
        _check_share("high", self.high)
        return self


class BinomialLength(StrictModel):
    """The trace is cut into `chunks` pieces of equal length, of which k ~ Binomial(chunks, probability) are given: UFT
    (arXiv 2505.16984)."""

    kind: Literal["binomial"]
    chunks: PositiveInt = 5
    probability: ScheduledValue

    @model_validator(mode="after")
    def _shares(self) -> "BinomialLength":
        _check_share("probability", self.probability)
        return self


class EvenlySpacedLength(StrictModel):
    """Evenly spaced shares from low to high over the prefix-conditioned rows of a group: LUFFY's `fixed`."""

    kind: Literal["evenly_spaced"]
    low: float = Field(default=0.0, ge=0.0, le=1.0)
    high: float = Field(default=1.0, ge=0.0, le=1.0)

    @model_validator(mode="after")
    def _ordered(self) -> "EvenlySpacedLength":
        if self.low >= self.high:
            raise ValueError(f"low {self.low} must be below high {self.high}")
        return self


PrefixLength = Annotated[UniformLength | BinomialLength | EvenlySpacedLength, Field(discriminator="kind")]


class PrefixConfig(StrictModel):
    """Prefix-conditioned rows: the start of a trace, continued by the policy.

    A prefix is never the whole trace: the policy samples at least the last token (the stop token). A row with an empty
    prefix is a rollout.
    """

    length: PrefixLength
    shared: bool = False
    """All prefix-conditioned rows of a group use the same share (LUFFY's `prefix_share_across_samples`)."""

    @model_validator(mode="after")
    def _effective(self) -> "PrefixConfig":
        if self.shared and isinstance(self.length, EvenlySpacedLength):
            raise ValueError("shared contradicts length.kind: evenly_spaced; remove one of them")
        return self

    @property
    def depends_on_length(self) -> bool:
        """Whether the prefixes of a step change when the stage is made longer."""
        values = {UniformLength: ("low", "high"), BinomialLength: ("probability",)}.get(type(self.length), ())
        return any(depends_on_length(getattr(self.length, name)) for name in values)


class DropZeroVariance(StrictModel):
    """Drop zero-variance groups, those whose rewards are all equal: their group advantages are 0."""

    kind: Literal["drop_zero_variance"]


class DynamicSampling(StrictModel):
    """DAPO's dynamic sampling (arXiv 2503.14476, section 3.2): drop zero-variance groups and roll out more prompts."""

    kind: Literal["dynamic_sampling"]
    max_rounds: Annotated[int, Field(ge=2)] = 10
    """Rounds of `rl.prompts_per_step` prompts, the first included; then the step learns from what it has."""


GroupFilter = Annotated[DropZeroVariance | DynamicSampling, Field(discriminator="kind")]


class GuidanceConfig(StrictModel):
    """Limits off-policy rows to prompts that the policy rarely solves.

    Other prompts get rollouts only. A prompt without a pass rate yet has off-policy rows.
    """

    pass_rate_at_most: _Accuracy
    """Highest running pass rate in earlier steps, inclusive."""
    memory: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.5
    """Weight of the previous running pass rate when a new group's is averaged in; 0: only the last group counts."""


class HintConfig(StrictModel):
    """Rollouts under a prompt that shows the first steps of a trace, where rollouts of the bare prompt fail.

    Guide (arXiv 2506.13923) and Scaf-GRPO (2510.19807). The steps of a trace are the lines of its reasoning, or its
    words where it has one line. A hint never has the last step, so a trace of one step gives no hint.
    """

    levels: Annotated[tuple[_HintShare, ...], Field(min_length=1)]
    """Share of the trace's steps that each level shows, rounded down to whole steps, at least one; rising."""
    rows_per_level: PositiveInt = 1
    """Rows sampled at each level, all levels in one call of the engine."""
    keep: Literal["all", "first_correct"]
    """Which hinted rows replace wrong rollouts. `all`: every one, in place of the first wrong rollouts;
    `first_correct`: the first correct one of the lowest level that has one, if any."""
    learn: Literal["bare", "hinted"]
    """The prompt that a hinted row is learned under. `bare`: off-policy rows whose recorded log-probabilities are those
    under the hinted prompt; `hinted`: rollouts of another prompt, with the hint still in it."""
    accuracy_at_most: _Accuracy = 0.0
    """Hints are for prompts whose share of correct bare rollouts is at most this."""
    after: _Accuracy = 0.0
    """Share of the stage's steps, at its start, without hints."""
    template: str = "{prompt}\n\nHint: {hint}"
    """Last user message of the hinted prompt; `{prompt}` is replaced by its text without the hint. A language model
    has to be told to solve the problem from the start instead of continuing the hint."""

    @model_validator(mode="after")
    def _effective(self) -> "HintConfig":
        if any(low >= high for low, high in itertools.pairwise(self.levels)):
            raise ValueError(f"levels {list(self.levels)} must rise: a higher level shows more of the trace")
        check_slots(self.template, "prompt", "hint")
        return self

    @property
    def num_rows(self) -> int:
        """Hinted rows that are sampled for a prompt."""
        return len(self.levels) * self.rows_per_level


class AnchorConfig(StrictModel):
    """Rollouts that continue the start of a trace, where rollouts of the bare prompt fail: BREAD (arXiv 2506.17211).

    A binary search over the pieces of the trace finds how many the policy needs; every try samples a whole group. The
    steps of a trace are its lines, or its words where it has one line; the last piece is never given.
    """

    pieces: Annotated[int, Field(ge=2)] = 10
    """Pieces that the trace is cut into, of equal numbers of steps; fewer where it has fewer steps."""
    success_at_least: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.25
    """Share of correct rows below which more pieces are given."""
    success_at_most: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.75
    """Share of correct rows above which fewer pieces are given."""
    accuracy_at_most: _Accuracy = 0.0
    """The search is for prompts whose share of correct bare rollouts is at most this."""

    @model_validator(mode="after")
    def _ordered(self) -> "AnchorConfig":
        if self.success_at_least > self.success_at_most:
            raise ValueError(
                f"success_at_least {self.success_at_least:g} must not be above success_at_most {self.success_at_most:g}"
            )
        if self.accuracy_at_most >= self.success_at_least:
            raise ValueError(
                f"accuracy_at_most {self.accuracy_at_most:g} must be below success_at_least {self.success_at_least:g}: "
                "a prompt that succeeds as often needs no anchor"
            )
        return self


class GroupConfig(StrictModel):
    """The rows of one prompt in one RL step."""

    size: PositiveInt
    """Rows in a group, on- and off-policy together: the budget that comparisons keep equal."""
    off_policy: Annotated[int, Field(ge=0)]
    """Number of rows with a trace or its prefix; a prompt with fewer traces gets more rollouts."""
    prefix: PrefixConfig | None = None
    """Length of the prefixes that the off-policy rows begin with; None: the off-policy rows are whole traces."""
    off_policy_when_accuracy_at_most: _Accuracy | None = None
    """Roll out the full group first, and let traces take the place of wrong rollouts only where the share of correct
    ones is at most this; None: always have them."""
    guidance: GuidanceConfig | None = None
    """Which prompts have off-policy rows, by how often earlier steps solved them; None: all."""
    hint: HintConfig | None = None
    """Rows sampled with a part of a trace in the prompt, where the bare prompt's rollouts fail; None: none."""
    anchor: AnchorConfig | None = None
    """Groups that continue the start of a trace, where the bare prompt's rollouts fail; None: none."""
    filter: GroupFilter | None = None

    @model_validator(mode="after")
    def _effective(self) -> "GroupConfig":
        if self.off_policy >= self.size and self.prefix is None:
            raise ValueError(f"off_policy {self.off_policy} must be below size {self.size}: RL needs rollouts")
        if self.off_policy > self.size:
            raise ValueError(f"off_policy {self.off_policy} must not be above size {self.size}")
        if self.off_policy == 0 and self.prefix is not None:
            raise ValueError("prefix has no effect with off_policy: 0; set the number of off-policy rows")
        if self.guidance is not None and self.off_policy == 0:
            raise ValueError("guidance has no effect with off_policy: 0; set the number of off-policy rows")
        if self.guidance is not None and self.off_policy == self.size:
            raise ValueError(
                "guidance depends on rollouts, and a group of only off-policy rows has none; lower off_policy"
            )
        if self.hint is not None:
            self._check_hint(self.hint)
        if self.anchor is not None:
            self._check_anchor(self.anchor)
        if self.off_policy_when_accuracy_at_most is not None:
            if self.off_policy == 0:
                raise ValueError("off_policy_when_accuracy_at_most has no effect with off_policy: 0")
            if self.prefix is not None:
                raise ValueError(
                    "off_policy_when_accuracy_at_most adds whole traces after the rollouts; remove it or prefix"
                )
        return self

    def _check_anchor(self, anchor: AnchorConfig) -> None:
        if self.off_policy or self.hint is not None:
            other = "hint" if self.hint is not None else "off_policy"
            raise ValueError(f"anchor and {other} both use traces where rollouts fail; keep one of them")
        low, high = anchor.success_at_least, anchor.success_at_most
        if not any(low <= num / self.size <= high for num in range(self.size + 1)):
            raise ValueError(
                f"anchor: no number of correct rows among size {self.size} is a share between {low:g} and {high:g}; "
                "widen the bounds"
            )

    def _check_hint(self, hint: HintConfig) -> None:
        if self.off_policy:
            raise ValueError("hint shows traces in the prompt, off_policy makes rows of them; set off_policy: 0")
        if hint.keep == "all" and hint.num_rows > self.size:
            raise ValueError(
                f"hint: {len(hint.levels)} levels x {hint.rows_per_level} rows are above size {self.size}; lower "
                "rows_per_level, or set keep: first_correct"
            )
        most_correct = max(num for num in range(self.size + 1) if num / self.size <= hint.accuracy_at_most)
        if hint.keep == "all" and most_correct + hint.num_rows > self.size:
            raise ValueError(
                f"hint: with accuracy_at_most {hint.accuracy_at_most:g} a group may have fewer wrong rollouts than the "
                f"{hint.num_rows} rows that replace them; lower accuracy_at_most or rows_per_level"
            )


class ReplayConfig(StrictModel):
    """Experience replay of the policy's own successes: ExGRPO (arXiv 2510.02245).

    A replayed prompt has one stored success of its own in place of one rollout; the rest of the group is rolled out
    anew. Prompts are bucketed by how many of their last rollouts were right.
    """

    share: Annotated[float, Field(gt=0.0, le=1.0)] = 0.5
    """Share of the step's prompts that are replayed; fewer while the buffer holds fewer."""
    start_accuracy: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.35
    """Successes are recorded from the step after the first whose share of correct rollouts is above this, and replayed
    from the next on."""
    bucket_mean: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.5
    """Mean of the normal density over the share of correct rollouts, by which buckets are sampled."""
    bucket_std: PositiveFloat = 0.125
    """Its standard deviation (one row of a group of eight)."""
    choose: Literal["lowest_entropy", "latest"] = "lowest_entropy"
    """Which stored success of a prompt is replayed: lowest mean entropy under the present policy, or the latest."""
    retire_solved: bool = True
    """A prompt whose rollouts are all right leaves the buffer for good."""


def _check_share(name: str, value: ScheduledValue) -> None:
    low, high = bounds(value)
    if low < 0 or high > 1:
        raise ValueError(f"{name} runs from {low:g} to {high:g}; it is a share of the trace, between 0 and 1")


def check_slots(template: str, *names: str) -> None:
    """Raise ValueError unless every slot, such as `{trace}`, occurs in the template exactly once."""
    for name in names:
        if template.count(f"{{{name}}}") != 1:
            raise ValueError(f"template must have {{{name}}} once; it is {template!r}")


def fill_slots(template: str, texts: Mapping[str, str]) -> str:
    """The template with its slots filled. The texts themselves may hold braces or the name of a slot."""
    slots = "|".join(re.escape(f"{{{name}}}") for name in texts)
    return re.sub(slots, lambda slot: texts[slot[0][1:-1]], template)

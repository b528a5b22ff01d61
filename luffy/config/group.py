"""The rows of one prompt, which groups are kept, and the advantage of each row. R_i is the reward of row i, |o_i| its
number of response tokens, n the size of the population."""

import itertools
import re
from collections.abc import Iterator, Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field, PositiveInt

from luffy.config.strict import Fraction, ImportPath, PositiveShare, Share, ShareBelowOne, StrictModel
from luffy.config.terms import (
    HintLevel,
    LevelByHistory,
    ScheduledValue,
    Written,
    bounds,
    constant,
    depends_on_length,
)


class _Advantage(Written):
    """Options of every estimator."""

    zero_truncated: bool = False
    """Rollouts that ran into the length limit get advantage 0 (they still count in the baseline)."""


class _GroupBaseline(_Advantage):
    population: Literal["joint", "on_policy"]
    """Rows whose rewards form the baseline. `on_policy`: demonstrations have advantage 0, for auxiliary terms alone."""


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
    written: ClassVar[str] = "R_i - mean of the other rows' R"


class LengthWeightedAdvantage(_GroupBaseline):
    """OPO (arXiv 2505.23585): the variance-minimising baseline, the mean of R weighted by response length."""

    kind: Literal["length_weighted"]
    written: ClassVar[str] = "R_i - sum(|o| R) / sum(|o|)"


class PassAtKAdvantage(_GroupBaseline):
    """Pass@k training (arXiv 2508.10751): the analytic advantage when the reward is that of the best of k. As in the
    paper, a row is right or wrong; here it is right where its reward is above 0, so also with partial credit."""

    kind: Literal["pass_at_k"]
    k: Annotated[int, Field(ge=2)]
    written: ClassVar[str] = "that of the best of {k}, over all subsets of the group"


class GlobalBatchAdvantage(_GroupBaseline):
    """REINFORCE++ (arXiv 2501.03262): normalised by mean and standard deviation over all tokens of the RL step."""

    kind: Literal["global_batch"]
    group_baseline: bool = False
    """Subtract the group's mean first (REINFORCE++-baseline)."""

    def formula(self) -> str:
        centred = "(R_i - mean over the group)" if self.group_baseline else "R_i"
        return f"({centred} - mean) / std, both over all tokens of the RL step"


class RawAdvantage(_Advantage):
    """REINFORCE (Williams 1992): A_i = R_i, also for traces. Groups of equal rewards have a gradient unless these are
    0."""

    kind: Literal["raw"]
    population: ClassVar[Literal["joint"]] = "joint"
    """Without a baseline, all rows are treated alike."""
    written: ClassVar[str] = "R_i"


class CustomAdvantage(_Advantage):
    """Advantages of your own: `function(rows, **options)`, from a `luffy.objectives.advantages.RowRewards` (all rows of
    an RL step) to a float64 advantage of each row, `(B,)`."""

    kind: Literal["custom"]
    population: ClassVar[Literal["joint"]] = "joint"
    function: ImportPath
    """`package.module:function`, importable from the working directory or the environment. The module is part of the
    stage's key, with what it imports of the user's own."""
    options: dict[str, int | float | bool | str | None] = Field(default={})
    """Keyword arguments of the function."""

    def formula(self) -> str:
        given = "".join(f", {name}={value}" for name, value in self.options.items())
        return f"{self.function}(R, lengths, groups{given})"


class NoAdvantage(_Advantage):
    """A_i = 0: no term uses the rewards, which are measured all the same (pure distillation)."""

    kind: Literal["none"]
    population: ClassVar[Literal["joint"]] = "joint"
    written: ClassVar[str] = "0"


class GeneralizedAdvantage(_Advantage):
    """GAE (arXiv 1506.02438) with the critic of `rl.critic`; the reward falls on the last token."""

    kind: Literal["gae"]
    gamma: PositiveShare = 1.0
    lam: Share = 0.95
    whiten: bool = True
    """Mean 0 and standard deviation 1 over the tokens of the RL step."""

    def formula(self) -> str:
        whitened = ", whitened over the batch" if self.whiten else ""
        return f"sum_l ({self.gamma:g} x {self.lam:g})^l (r_t+l + {self.gamma:g} V_t+l+1 - V_t+l){whitened}"


ComparedAdvantage = (
    GroupMeanAdvantage | LeaveOneOutAdvantage | LengthWeightedAdvantage | PassAtKAdvantage | GlobalBatchAdvantage
)
GroupAdvantage = ComparedAdvantage | RawAdvantage | CustomAdvantage | NoAdvantage
"""Estimators that give each row one number."""
AdvantageConfig = Annotated[GroupAdvantage | GeneralizedAdvantage, Field(discriminator="kind")]


class UniformLength(StrictModel):
    """Share of the trace ~ U(low, high), both of which may move over the run. LUFFY's strategies: `random` is low 0 and
    high 1; `linear` has low = high falling to 0; `linear_max` is low 0 and high falling in ten levels; `reverse_linear`
    rises instead. Prefix-RFT (arXiv 2507.01679) lets low fall."""

    kind: Literal["uniform"]
    low: ScheduledValue
    high: ScheduledValue

    def _complaints(self) -> Iterator[str]:
        yield from _share_complaints(low=self.low, high=self.high)


class BinomialLength(StrictModel):
    """UFT (arXiv 2505.16984): of `chunks` equal pieces of the trace, Binomial(chunks, probability) are given."""

    kind: Literal["binomial"]
    chunks: PositiveInt = 5
    probability: ScheduledValue

    def _complaints(self) -> Iterator[str]:
        yield from _share_complaints(probability=self.probability)


class EvenlySpacedLength(StrictModel):
    """Evenly spaced shares from low to high over the prefix-conditioned rows of a group: LUFFY's `fixed`."""

    kind: Literal["evenly_spaced"]
    low: float = Field(default=0.0, ge=0.0, le=1.0)
    high: float = Field(default=1.0, ge=0.0, le=1.0)

    def _complaints(self) -> Iterator[str]:
        if self.low >= self.high:
            yield f"low {self.low} must be below high {self.high}"


class Rung(StrictModel):
    """Rows of a group that are sampled together, after those of earlier rungs."""

    rows: PositiveInt = 1
    share: PositiveShare
    """Share of the trace that the rows begin with."""
    below: PositiveShare
    """Only where the share of correct rows so far is below this; else they are rollouts."""


class SuccessLadder(StrictModel):
    """TRAPO's micro-groups (arXiv 2512.17636): after the rollouts, rung after rung is sampled, which begin with some of
    the trace where the rows so far have failed too often. Each rung is a call of the engine."""

    kind: Literal["by_success"]
    rungs: Annotated[tuple[Rung, ...], Field(min_length=1)]

    @property
    def num_rows(self) -> int:
        return sum(rung.rows for rung in self.rungs)

    @property
    def shares(self) -> tuple[float, ...]:
        """One for each row."""
        return tuple(rung.share for rung in self.rungs for _ in range(rung.rows))


PrefixLength = Annotated[
    UniformLength | BinomialLength | EvenlySpacedLength | SuccessLadder, Field(discriminator="kind")
]


class PrefixConfig(StrictModel):
    """Prefix-conditioned rows: the start of a trace, continued by the policy. A prefix is never the whole trace: the
    policy samples at least the last token (the stop token). A row with an empty prefix is a rollout."""

    length: PrefixLength
    shared: bool = False
    """All prefix-conditioned rows of a group use the same share (LUFFY's `prefix_share_across_samples`)."""

    def _complaints(self) -> Iterator[str]:
        if self.shared and isinstance(self.length, EvenlySpacedLength | SuccessLadder):
            yield f"shared contradicts length.kind: {self.length.kind}; remove one of them"

    @property
    def by_success(self) -> bool:
        """Whether rows are sampled in turn, each as those before it call for."""
        return isinstance(self.length, SuccessLadder)

    @property
    def depends_on_length(self) -> bool:
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
    """Off-policy rows only for prompts with a low running pass rate, or none yet; other prompts get rollouts only."""

    pass_rate_at_most: ShareBelowOne
    """Highest running pass rate in earlier steps, inclusive."""
    memory: ShareBelowOne = 0.5
    """Weight of the previous running pass rate when a new group's is averaged in; 0: only the last group counts."""


class HintedGroupsConfig(StrictModel):
    """Whole groups under a hint, beside groups of the bare prompt: QuestA (arXiv 2507.13266), POPE (2601.18779)."""

    share: PositiveShare = 1.0
    """Probability that a group is hinted."""
    level: HintLevel = constant(1.0)
    """Number of the level, from 1; a schedule is rounded."""


Keep = Literal["all", "first_correct", "all_correct", "best"]
"""Which rows of a second round stay in the group. `all`: every one, in place of the first wrong rollouts;
`first_correct`, `all_correct`: the first correct one, or all of them, in place of wrong rollouts; `best`: the first
correct one, else the first, in place of the first rollout, right or wrong."""


class HintConfig(StrictModel):
    """Rollouts under a prompt that shows the first steps of a trace, where rollouts of the bare prompt fail. Guide
    (arXiv 2506.13923) and Scaf-GRPO (2510.19807). The steps of a trace are the lines of its reasoning, or its words
    where it has one line. A hint never has the last step, so a trace of one step gives no hint."""

    levels: Annotated[tuple[Fraction, ...], Field(min_length=1)]
    """Share of the trace's steps that each level shows, rounded down to whole steps, at least one; rising."""
    rows_per_level: PositiveInt = 1
    """Rows sampled at each level, all levels in one call of the engine."""
    keep: Keep
    """Which hinted rows stay, those of lower levels first."""
    learn: Literal["bare", "hinted"]
    """The prompt that a hinted row is learned under. `bare`: off-policy rows whose recorded log-probabilities are those
    under the hinted prompt; `hinted`: rollouts of another prompt, with the hint still in it."""
    accuracy_at_most: ShareBelowOne = 0.0
    """Hints are for prompts whose share of correct bare rollouts is at most this."""
    after: ShareBelowOne = 0.0
    """Share of the stage's steps, at its start, without hints."""
    template: str = "{prompt}\n\nHint: {hint}"
    """Last user message of the hinted prompt; `{prompt}` is its text without the hint. A language model has to be told
    to solve the problem from the start instead of continuing the hint."""
    groups: HintedGroupsConfig | None = None
    """Groups that are hinted whether or not the bare prompt is solved, all rows at one level; None: only where it
    fails."""

    def _complaints(self) -> Iterator[str]:
        if self.groups is not None:
            if (self.keep, self.learn) != ("all", "hinted"):
                yield "groups are learned as they are sampled; set keep: all and learn: hinted"
            for name in self.changed("rows_per_level", "accuracy_at_most", "after"):
                yield f"{name} has no effect with groups, which wait for no failure; remove it"
            if not isinstance(self.groups.level, LevelByHistory):
                low, high = bounds(self.groups.level)
                if round(low) < 1 or round(high) > len(self.levels):
                    yield f"groups.level runs from {low:g} to {high:g}; there are levels 1 to {len(self.levels)}"
        if any(low >= high for low, high in itertools.pairwise(self.levels)):
            yield f"levels {list(self.levels)} must rise: a higher level shows more of the trace"
        yield from slot_complaints(self.template, "prompt", "hint")

    @property
    def num_rows(self) -> int:
        return len(self.levels) * self.rows_per_level

    @property
    def depends_on_length(self) -> bool:
        return self.after > 0 or (self.groups is not None and depends_on_length(self.groups.level))


class RetryConfig(StrictModel):
    """A second round of rollouts, under prompts that show the first one and what the grader found: Critique-GRPO (arXiv
    2506.03106) and LTE (2510.26109). Its rows are hinted rows of level 1, the feedback being the hint."""

    about: Literal["each", "all"]
    """What a prompt is about. `each`: one response of the first round, which its rows take in turn; `all`: the wrong
    ones together."""
    num_rows: PositiveInt
    """Rows sampled in the second round, in one call of the engine."""
    keep: Keep
    """Which of them stay."""
    learn: Literal["bare", "hinted"] = "bare"
    """The prompt that they are learned under, as in `HintConfig`."""
    accuracy_at_most: Share = 0.0
    """The second round is for prompts whose share of correct rollouts is at most this; 1: for all."""
    wrong: str
    """Feedback on wrong responses; `{answers}` are their different answers, `{reference}` is the reference answer."""
    truncated: str | None = None
    """Feedback on wrong responses that ran into the length limit; None: as on other wrong ones."""
    right: str | None = None
    """With `about: each`, feedback on a right response; None: right ones are not shown."""
    template: str
    """Last user message of the prompt; `{prompt}` is its text, `{feedback}` the feedback and, with `about: each`,
    `{response}` the response."""
    max_prompt_tokens: PositiveInt | None = None
    """Longest prompt of the second round; a row whose prompt would be longer is not sampled. None: as long as a prompt
    with a response of `rl.max_response_tokens`, for which the model has to have room."""

    def _complaints(self) -> Iterator[str]:
        yield from slot_complaints(self.template, "prompt", "feedback")
        if self.about == "all" and "{response}" in self.template:
            yield "template: {response} has no meaning with about: all; remove it, or set about: each"
        if self.about == "all" and self.right is not None:
            yield "right has no effect with about: all, which is about the wrong responses; remove it"


class AnchorConfig(StrictModel):
    """Rollouts that continue the start of a trace, where rollouts of the bare prompt fail: BREAD (arXiv 2506.17211). A
    binary search over the pieces of the trace finds how many the policy needs; every try samples a whole group. The
    steps of a trace are its lines, or its words where it has one line; the last piece is never given."""

    pieces: Annotated[int, Field(ge=2)] = 10
    """Pieces that the trace is cut into, of equal numbers of steps; fewer where it has fewer steps."""
    success_at_least: Fraction = 0.25
    """Share of correct rows below which more pieces are given."""
    success_at_most: Fraction = 0.75
    """Share of correct rows above which fewer pieces are given."""
    accuracy_at_most: ShareBelowOne = 0.0
    """The search is for prompts whose share of correct bare rollouts is at most this."""

    def _complaints(self) -> Iterator[str]:
        if self.success_at_least > self.success_at_most:
            yield (
                f"success_at_least {self.success_at_least:g} must not be above success_at_most {self.success_at_most:g}"
            )
        if self.accuracy_at_most >= self.success_at_least:
            yield (
                f"accuracy_at_most {self.accuracy_at_most:g} must be below success_at_least {self.success_at_least:g}: "
                "a prompt that succeeds as often needs no anchor"
            )


class GroupConfig(StrictModel):
    """The rows of one prompt in one RL step."""

    size: PositiveInt
    """Rows in a group, on- and off-policy together: the budget that comparisons keep equal."""
    off_policy: Annotated[int, Field(ge=0)]
    """Number of rows with a trace or its prefix; a prompt with fewer traces gets more rollouts."""
    prefix: PrefixConfig | None = None
    """Length of the prefixes that the off-policy rows begin with; None: the off-policy rows are whole traces."""
    off_policy_when_accuracy_at_most: ShareBelowOne | None = None
    """Traces replace wrong rollouts of a full group where the share of correct ones is at most this; None: always."""
    choose: Literal["in_turn", "likeliest_answer"] = "in_turn"
    """Which of a prompt's traces replace them. `in_turn`: consecutive ones, from another start in every step;
    `likeliest_answer`: of the correct ones those after whose reasoning the policy of this step gives the tokens of the
    reference answer the highest mean probability (AMPO, arXiv 2510.02227)."""
    guidance: GuidanceConfig | None = None
    """Which prompts have off-policy rows, by how often earlier steps solved them; None: all."""
    hint: HintConfig | None = None
    """Rows sampled with a part of a trace in the prompt, where the bare prompt's rollouts fail; None: none."""
    retry: RetryConfig | None = None
    """Rows of a second round whose prompts show the first one and its grades; None: none."""
    anchor: AnchorConfig | None = None
    """Groups that continue the start of a trace, where the bare prompt's rollouts fail; None: none."""
    filter: GroupFilter | None = None

    def _complaints(self) -> Iterator[str]:
        size, anchor, seconds = self.size, self.anchor, {"hint": self.hint, "retry": self.retry}
        if self.off_policy >= size and self.prefix is None:
            yield f"off_policy {self.off_policy} must be below size {size}: RL needs rollouts"
        if self.off_policy > size:
            yield f"off_policy {self.off_policy} must not be above size {size}"
        ladder = None if self.prefix is None else self.prefix.length
        if isinstance(ladder, SuccessLadder) and not ladder.num_rows == self.off_policy < size:
            yield (
                f"prefix.length.rungs have {ladder.num_rows} rows, which off_policy {self.off_policy} has to equal, "
                f"below size {size}"
            )
        for name in ("prefix", "guidance"):
            if self.off_policy == 0 and getattr(self, name) is not None:
                yield f"{name} has no effect with off_policy: 0; set the number of off-policy rows"
        if self.guidance is not None and self.off_policy == size:
            yield "guidance depends on rollouts, and a group of only off-policy rows has none; lower off_policy"
        for name, second in seconds.items():
            if second is None:
                continue
            if self.off_policy:
                yield f"{name} samples rows of other prompts, off_policy makes rows of traces; set off_policy: 0"
            if second.keep != "all" or (isinstance(second, HintConfig) and second.groups is not None):
                continue
            if second.num_rows > size:
                yield f"{name}: {second.num_rows} rows are above size {size}; sample fewer, or set keep: first_correct"
            most_correct = max(num for num in range(size + 1) if num / size <= second.accuracy_at_most)
            if most_correct + second.num_rows > size:
                yield (
                    f"{name}: with accuracy_at_most {second.accuracy_at_most:g} a group may have fewer wrong rollouts "
                    f"than the {second.num_rows} rows that replace them; lower accuracy_at_most or the number of rows"
                )
        given = [name for name, second in {**seconds, "anchor": anchor}.items() if second is not None]
        if len(given) > 1:
            yield f"{' and '.join(given)} both sample again where rollouts fail; keep one of them"
        if anchor is not None:
            if self.off_policy:
                yield "anchor and off_policy both use traces where rollouts fail; keep one of them"
            low, high = anchor.success_at_least, anchor.success_at_most
            if not any(low <= num / size <= high for num in range(size + 1)):
                yield (
                    f"anchor: no number of correct rows among size {size} is a share between {low:g} and {high:g}; "
                    "widen the bounds"
                )
        if self.off_policy_when_accuracy_at_most is not None:
            if self.off_policy == 0:
                yield "off_policy_when_accuracy_at_most has no effect with off_policy: 0"
            if self.prefix is not None:
                yield "off_policy_when_accuracy_at_most adds whole traces after the rollouts; remove it or prefix"
        elif self.choose != "in_turn":
            yield (
                f"choose: {self.choose} is among traces that replace failed rollouts; set "
                "off_policy_when_accuracy_at_most, or remove it"
            )


class ReplayConfig(StrictModel):
    """Experience replay of the policy's own successes: ExGRPO (arXiv 2510.02245). A stored success takes the place of
    one rollout of its prompt's group. Prompts are bucketed by how many of their last rollouts were right; one whose
    rollouts are all right leaves the buffer for good."""

    share: PositiveShare = 0.5
    """Share of the step's prompts that are replayed; fewer while the buffer holds fewer."""
    start_accuracy: ShareBelowOne = 0.35
    """Successes are recorded after the first step with more correct rollouts than this share, then replayed."""
    choose: Literal["lowest_entropy", "latest"] = "lowest_entropy"
    """Which stored success of a prompt is replayed: lowest mean entropy under the present policy, or the latest."""


def _share_complaints(**shares: ScheduledValue) -> Iterator[str]:
    for name, value in shares.items():
        low, high = bounds(value)
        if low < 0 or high > 1:
            yield f"{name} runs from {low:g} to {high:g}; it is a share of the trace, between 0 and 1"


def slot_complaints(template: str, *names: str) -> Iterator[str]:
    """Every slot, such as `{trace}`, has to be in the template exactly once."""
    for name in names:
        if template.count(f"{{{name}}}") != 1:
            yield f"template must have {{{name}}} once; it is {template!r}"


def fill_slots(template: str, texts: Mapping[str, str]) -> str:
    """The template with its slots filled. The texts themselves may hold braces or the name of a slot."""
    slots = "|".join(re.escape(f"{{{name}}}") for name in texts)
    return re.sub(slots, lambda slot: texts[slot[0][1:-1]], template)

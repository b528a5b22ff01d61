"""The rows of one prompt, which groups are kept, and the advantage of each row. R_i is the reward of row i, |o_i| its
number of response tokens, n the size of the population."""

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import Field, PositiveInt, field_validator

from luffy.config.starts import StartConfig, WholeTrace, complaints_about_starts
from luffy.config.strict import ImportPath, Name, PositiveShare, Share, ShareBelowOne, StrictModel
from luffy.config.terms import Written


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


class DropZeroVariance(StrictModel):
    """Drop zero-variance groups, those whose rewards are all equal: their group advantages are 0."""

    kind: Literal["drop_zero_variance"]


class DynamicSampling(StrictModel):
    """DAPO's dynamic sampling (arXiv 2503.14476, section 3.2): drop zero-variance groups and roll out more prompts."""

    kind: Literal["dynamic_sampling"]
    max_rounds: Annotated[int, Field(ge=2)] = 10
    """Rounds of `rl.prompts_per_step` prompts, the first included; then the step learns from what it has."""


GroupFilter = Annotated[DropZeroVariance | DynamicSampling, Field(discriminator="kind")]


class GroupConfig(StrictModel):
    """The rows of one prompt in one RL step."""

    size: PositiveInt
    """Rows in a group, on- and off-policy together: the budget that comparisons keep equal."""
    starts: dict[Name, StartConfig] = Field(default={})
    """What some of the rows are given before the policy writes, in order, by names of your own; `NAME: null` takes one
    away. Others are rollouts of the bare prompt."""
    filter: GroupFilter | None = None

    @field_validator("starts", mode="before")
    @classmethod
    def _present(cls, value: object) -> object:
        return {name: start for name, start in value.items() if start is not None} if isinstance(value, dict) else value

    def _complaints(self) -> Iterator[str]:
        yield from complaints_about_starts(self.starts, self.size)

    @property
    def fallback(self) -> StartConfig | None:
        """The start for groups whose rollouts fail."""
        return next((start for start in self.starts.values() if start.is_fallback), None)

    @property
    def lets_trainer_choose(self) -> bool:
        """Whether the trainer chooses among the traces of failed groups."""
        shown = (start.show for start in self.starts.values())
        return any(isinstance(show, WholeTrace) and show.choose != "in_turn" for show in shown)

    def shows(self, *kinds: type[StrictModel]) -> list[str]:
        """Names of the starts that show something of these classes."""
        return [name for name, start in self.starts.items() if isinstance(start.show, kinds)]

    @property
    def num_other_rows(self) -> int:
        """Rows of a group that are no rollouts, at most: whole traces, and rows that continue a trace."""
        return sum(
            self.size if start.rows == "all" else start.rows
            for start in self.starts.values()
            if not start.is_fallback and not start.is_in_prompt
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

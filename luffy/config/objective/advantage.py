"""Advantage estimators, which turn the rewards of a group into an advantage for each token.

R_i is the reward of row i, |o_i| its number of response tokens, n the size of the population.
"""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, NonNegativeFloat

from luffy.config.strict import StrictModel


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

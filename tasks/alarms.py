"""The rules for what is alarming in a running stage: pure functions of its metrics and of the free disk space."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from luffy.cli.console import size_words
from luffy.config.model import DType
from luffy.rl.logp_gap import suspicious_gap
from luffy.tracking.advice import had_signal

AlarmKind = Literal["logp-gap", "zero-reward", "no-signal", "disk"]
_GAP = "rollout/logp_gap_mean"
_REWARD = "reward/mean"


@dataclass(frozen=True, slots=True)
class Alarm:
    """A condition that somebody should look at."""

    kind: AlarmKind
    text: str
    """What was found, in one line."""


def event_of(kind: AlarmKind) -> str:
    """Name of the event that reports an alarm of this kind."""
    return f"luffy.stage.{kind}"


def gap_bound(max_logp_gap: float | None, max_staleness: int, dtype: DType) -> float | None:
    """The gap in nats above which there is an alarm: the lowest bound that RL itself checks; None if it has none."""
    bounds = (max_logp_gap, suspicious_gap(dtype, max_staleness))
    return min((bound for bound in bounds if bound is not None), default=None)


def gap_alarm(row: Mapping[str, float], bound: float | None) -> Alarm | None:
    """An alarm if engine and trainer disagree by more than `bound` nats per token in this step."""
    gap = row.get(_GAP, math.nan)
    if bound is None or not gap > bound:
        return None
    return Alarm("logp-gap", f"{_GAP} is {gap:.4g} at step {row['step']:.0f}, above the bound of {bound:g}")


@dataclass(frozen=True, slots=True)
class RewardHistory:
    """What the logged steps so far say about the mean reward of the rollouts."""

    was_above: bool = False
    """Whether it has been above 0."""
    num_zeros: int = 0
    """Newest consecutive steps in which it was exactly 0."""

    def after(self, row: Mapping[str, float]) -> "RewardHistory":
        """The history with one more row; rows without a reward, or with NaN, change nothing."""
        reward = row.get(_REWARD, math.nan)
        if math.isnan(reward):
            return self
        return RewardHistory(self.was_above or reward > 0.0, self.num_zeros + 1 if reward == 0.0 else 0)

    def alarm(self, num_steps: int) -> Alarm | None:
        """An alarm if the reward has been 0 for `num_steps` steps or more, and was above 0 before."""
        if not self.was_above or self.num_zeros < num_steps:
            return None
        return Alarm("zero-reward", f"{_REWARD} fell to 0 and has been 0 for {self.num_zeros} steps in a row")


@dataclass(frozen=True, slots=True)
class SignalHistory:
    """What the logged steps so far say about the learning signal (`luffy.tracking.advice`)."""

    num_silent: int = 0
    """Newest consecutive steps without one."""

    def after(self, row: Mapping[str, float]) -> "SignalHistory":
        """The history with one more row; rows that are no RL step change nothing."""
        signal = had_signal(row)
        return self if signal is None else SignalHistory(0 if signal else self.num_silent + 1)

    def alarm(self, num_steps: int) -> Alarm | None:
        """An alarm if `num_steps` steps or more in a row had no signal."""
        if self.num_silent < num_steps:
            return None
        found = f"every advantage has been 0 for {self.num_silent} steps in a row"
        return Alarm("no-signal", f"{found}: rewards teach the policy nothing")


def disk_alarm(free_bytes: int, least_bytes: float, place: str) -> Alarm | None:
    """An alarm if `place` has less free space than `least_bytes`."""
    if free_bytes >= least_bytes:
        return None
    return Alarm("disk", f"the disk of {place} is nearly full: {size_words(free_bytes)} free")

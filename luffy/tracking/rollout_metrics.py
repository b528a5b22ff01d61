"""What a step's groups say about the policy: rewards, outcomes, lengths, and how much signal the groups carry."""

from collections.abc import Sequence
from statistics import fmean

from luffy.types import FinishReason, Group, Outcome, Trajectory


def rollout_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Metrics of one RL step in the namespaces `batch/`, `rollout/` and `reward/`.

    Off-policy figures are left out when there is no demonstration, rather than reported as 0.
    """
    on = [row for group in groups for row in group.trajectories if not row.is_off_policy]
    off = [row for group in groups for row in group.trajectories if row.is_off_policy]
    metrics = {
        "reward/mean": fmean(row.reward for row in on),
        "rollout/response_length_mean": fmean(len(row.response_ids) for row in on),
        "rollout/truncated_share": fmean(row.finish_reason is FinishReason.LENGTH for row in on),
        "batch/on_reward": fmean(row.reward for row in on),
        "batch/solve_none": fmean(not any(_on_rewards(group)) for group in groups),
        "batch/solve_all": fmean(all(reward == 1.0 for reward in _on_rewards(group)) for group in groups),
        "batch/off_policy_token_share": _tokens(off) / (_tokens(on) + _tokens(off)),
    }
    metrics |= {f"reward/{outcome}_share": fmean(row.outcome is outcome for row in on) for outcome in Outcome}
    if off:
        metrics["batch/off_reward"] = fmean(row.reward for row in off)
        metrics["rollout/off_policy_length_mean"] = fmean(len(row.response_ids) for row in off)
    return metrics


def _on_rewards(group: Group) -> list[float]:
    return [row.reward for row in group.trajectories if not row.is_off_policy]


def _tokens(rows: Sequence[Trajectory]) -> int:
    return sum(len(row.response_ids) for row in rows)

"""The learning half of an RL step: graded groups in, optimizer steps out."""

import dataclasses
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from luffy.config.objective import AdvantageConfig, ObjectiveConfig
from luffy.config.training import RLConfig
from luffy.objectives.advantages import group_advantages
from luffy.objectives.schedules import schedule_multiplier
from luffy.training.batching import collate, take_rows
from luffy.training.policy import Policy
from luffy.types import Group, TrainBatch


def updates_per_step(rl: RLConfig) -> int:
    """Optimizer steps an RL step makes."""
    return 1 if rl.prompts_per_update is None else rl.prompts_per_step // rl.prompts_per_update


def advantages_of(groups: Sequence[Group], config: AdvantageConfig) -> Tensor:
    """`(B,)` group advantages of all rows, groups end to end."""
    rows = [row for group in groups for row in group.trajectories]
    return group_advantages(
        reward_B=torch.tensor([row.reward for row in rows]),
        group_B=torch.tensor([index for index, group in enumerate(groups) for _ in group.trajectories]),
        is_off_policy_B=torch.tensor([row.is_off_policy for row in rows]),
        config=config,
    )


def learn(
    policy: Policy, groups: Sequence[Group], objective: ObjectiveConfig, rl: RLConfig, step: int, pad_id: int
) -> dict[str, float]:
    """The optimizer steps of RL step `step` (counted from 1); returns their metrics, averaged."""
    rows = [row for group in groups for row in group.trajectories]
    advantage_B = advantages_of(groups, objective.advantage)
    batch = collate(rows, advantage_B, pad_id)
    num_updates = updates_per_step(rl)
    if num_updates > 1:
        # From the second update on the policy has moved; with one update it stands in for itself.
        batch = dataclasses.replace(batch, logp_old_BT=policy.logprobs(batch))
    history = []
    for update, part in enumerate(_mini_batches(batch, groups, num_updates)):
        index, total = (step - 1) * num_updates + update, rl.steps * num_updates
        lr = rl.optimizer.lr * schedule_multiplier(rl.optimizer.schedule, index, total)
        history.append(policy.update(part, objective.terms, rl.max_response_tokens, lr))
    return _mean_over_updates(history) | {"batch/zero_advantage_share": _silent_share(groups, advantage_B)}


def _silent_share(groups: Sequence[Group], advantage_B: Tensor) -> float:
    """Share of groups whose rows all have advantage 0: the policy gradient learns nothing from them."""
    parts = advantage_B.split([len(group.trajectories) for group in groups])
    return sum(not part.any() for part in parts) / len(parts)


def _mini_batches(batch: TrainBatch, groups: Sequence[Group], num_updates: int) -> Iterator[TrainBatch]:
    """Whole groups, in the order they were sampled."""
    starts = [0]
    for group in groups:
        starts.append(starts[-1] + len(group.trajectories))
    size = len(groups) // num_updates
    for update in range(num_updates):
        yield take_rows(batch, range(starts[update * size], starts[(update + 1) * size]))


def _mean_over_updates(history: Sequence[dict[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for metrics in history for name in metrics)
    means = {}
    for name in names:
        values = [metrics[name] for metrics in history if name in metrics]
        means[name] = sum(values) / len(values)
    return means

"""Shards the groups of an RL step over its optimizer steps and over the ranks of the trainer.

Advantages depend on whole groups, so they are computed here, before groups are split, and before an episode with
several contexts becomes several rows, which all have its advantage.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from luffy.config.objective import AdvantageConfig, GroupAdvantage
from luffy.objectives.advantages import RowRewards, group_advantages
from luffy.training.dealing import deal_groups, order_of_passes
from luffy.training.sharding import Shard, branches_of, over_ranks
from luffy.types import Group


def shard_groups(
    groups: Sequence[Group], config: AdvantageConfig, num_updates: int, num_ranks: int, seed: int, passes: int = 1
) -> list[Shard]:
    """The groups of an RL step as one shard for each rank.

    Whole groups are assigned to the `num_updates` optimizer steps of a pass (`deal_groups`, independent of the number
    of ranks), and the rows of an optimizer step are then balanced over the ranks by number of tokens. Later passes
    repeat these optimizer steps in other orders.
    """
    whole = one_shard(groups, config)
    hands = deal_groups(groups, num_updates, seed)
    updates = [[row for row, group in enumerate(whole.groups) if group in hand] for hand in hands]
    order = order_of_passes(len(updates), passes, seed)
    return [
        replace(shard, updates=tuple(shard.updates[update] for update in order))
        for shard in over_ranks(whole, updates, num_ranks)
    ]


def one_shard(groups: Sequence[Group], config: AdvantageConfig) -> Shard:
    """All rows, group after group, in one optimizer step."""
    responses = [row for group in groups for row in group.trajectories]
    group_of = [index for index, group in enumerate(groups) for _ in group.trajectories]
    by_group = isinstance(config, GroupAdvantage)
    advantages = row_advantages(groups, config).tolist() if by_group else [0.0] * len(responses)
    rows, episodes = branches_of(responses)
    return Shard(
        rows=rows,
        groups=tuple(group_of[episode] for episode in episodes),
        episodes=episodes,
        advantages=tuple(advantages[episode] for episode in episodes),
        updates=(range(len(rows)),),
        accuracies=tuple(group.accuracy for group in groups),
    )


def row_advantages(groups: Sequence[Group], config: AdvantageConfig) -> Tensor:
    """`(B,)` float64 advantages of all responses, group after group, before scaling."""
    rows = [row for group in groups for row in group.trajectories]
    return group_advantages(
        RowRewards(
            reward_B=torch.tensor([row.reward for row in rows], dtype=torch.float64),
            length_B=torch.tensor([row.num_learnable for row in rows]),
            group_B=torch.tensor(
                [index for index, group in enumerate(groups) for _ in group.trajectories], dtype=torch.long
            ),
            is_off_policy_B=torch.tensor([row.is_off_policy for row in rows], dtype=torch.bool),
        ),
        config,
    )

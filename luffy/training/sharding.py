"""Shards the rows of an RL step over its optimizer steps and over the ranks of the trainer.

Advantages depend on whole groups, so they are computed here, before groups are split. After that a row can go to any
rank, since everything else that depends on several rows (denominators, whitening, metrics) is summed over ranks.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from luffy.config.objective import AdvantageConfig, GroupAdvantage
from luffy.objectives.advantages import RowRewards, group_advantages
from luffy.training.dealing import deal_groups
from luffy.types import Group, Trajectory


@dataclass(frozen=True, slots=True)
class Shard:
    """The rows of one rank in one RL step, in the order of their optimizer steps."""

    rows: tuple[Trajectory, ...]
    groups: tuple[int, ...]
    """For each row, the index of its group in the step."""
    advantages: tuple[float, ...]
    """For each row, its advantage before scaling; 0 where a critic gives one to each token."""
    updates: tuple[range, ...]
    """The rows of each optimizer step, possibly none; all ranks have the same number of steps."""
    accuracies: tuple[float, ...]
    """Share of correct rollouts of each group in the step, whichever ranks have its rows."""

    def part(self, updates: Sequence[Sequence[int]]) -> "Shard":
        """The shard that takes these rows, a sequence for each optimizer step."""
        order = [row for update in updates for row in update]
        ends = itertools.accumulate(map(len, updates))
        return Shard(
            rows=tuple(self.rows[row] for row in order),
            groups=tuple(self.groups[row] for row in order),
            advantages=tuple(self.advantages[row] for row in order),
            updates=tuple(range(end - len(update), end) for update, end in zip(updates, ends, strict=True)),
            accuracies=self.accuracies,
        )


def shard_groups(
    groups: Sequence[Group], config: AdvantageConfig, num_updates: int, num_ranks: int, seed: int
) -> list[Shard]:
    """The groups of an RL step as one shard for each rank.

    Whole groups are assigned to optimizer steps (`deal_groups`, independent of the number of ranks), and the rows of an
    optimizer step are then balanced over the ranks by number of tokens.
    """
    whole = one_shard(groups, config)
    hands = deal_groups(groups, num_updates, seed)
    updates = [[row for row, group in enumerate(whole.groups) if group in hand] for hand in hands]
    return _over_ranks(whole, updates, num_ranks)


def shard_rows(rows: Sequence[Trajectory], num_ranks: int) -> list[Shard]:
    """Rows without groups (demonstrations), in one optimizer step."""
    count = len(rows)
    whole = Shard(tuple(rows), (0,) * count, (0.0,) * count, (range(count),), accuracies=(0.0,))
    return _over_ranks(whole, whole.updates, num_ranks)


def one_shard(groups: Sequence[Group], config: AdvantageConfig) -> Shard:
    """All rows, group after group, in one optimizer step."""
    rows = [row for group in groups for row in group.trajectories]
    by_group = isinstance(config, GroupAdvantage)
    return Shard(
        rows=tuple(rows),
        groups=tuple(index for index, group in enumerate(groups) for _ in group.trajectories),
        advantages=tuple(row_advantages(groups, config).tolist() if by_group else [0.0] * len(rows)),
        updates=(range(len(rows)),),
        accuracies=tuple(group.accuracy for group in groups),
    )


def row_advantages(groups: Sequence[Group], config: AdvantageConfig) -> Tensor:
    """`(B,)` float64 advantages of all rows, group after group, before scaling."""
    rows = [row for group in groups for row in group.trajectories]
    return group_advantages(
        RowRewards(
            reward_B=torch.tensor([row.reward for row in rows], dtype=torch.float64),
            length_B=torch.tensor([len(row.response_ids) for row in rows]),
            group_B=torch.tensor([index for index, group in enumerate(groups) for _ in group.trajectories]),
            is_off_policy_B=torch.tensor([row.is_off_policy for row in rows]),
        ),
        config,
    )


def _over_ranks(whole: Shard, updates: Sequence[Sequence[int]], num_ranks: int) -> list[Shard]:
    balanced = [_balanced(whole.rows, update, num_ranks) for update in updates]
    return [whole.part([of_rank[rank] for of_rank in balanced]) for rank in range(num_ranks)]


def _balanced(rows: Sequence[Trajectory], update: Sequence[int], num_ranks: int) -> list[list[int]]:
    """The rows of an optimizer step for each rank: longest first to the rank with the fewest tokens.

    The fullest rank has at most 4/3 of the tokens of the best split (Graham 1969). Rows keep their order within a rank.
    """
    placed: list[list[int]] = [[] for _ in range(num_ranks)]
    load = [0] * num_ranks
    for row in sorted(update, key=lambda row: (-rows[row].num_tokens, row)):
        rank = min(range(num_ranks), key=lambda rank: (load[rank], rank))
        placed[rank].append(row)
        load[rank] += rows[row].num_tokens
    return [sorted(of_rank) for of_rank in placed]

"""Shards the rows of an RL step over its optimizer steps and over the ranks of the trainer.

Advantages depend on whole groups, so they are computed here, before groups are split. After that a row can go to any
rank, since everything else that depends on several rows (denominators, whitening, metrics) is summed over ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from luffy.config.objective import AdvantageConfig, GroupAdvantage
from luffy.objectives.advantages import RowRewards, group_advantages
from luffy.training.dealing import deal_groups
from luffy.types import Group, Trajectory


@dataclass(frozen=True, slots=True)
class LearnRow:
    """A row with its advantage."""

    trajectory: Trajectory
    group: int = 0
    """Index of its group in the step."""
    advantage: float = 0.0
    """Advantage of the whole row, before scaling; 0 where a critic assigns one to each token."""
    group_accuracy: float = 0.0
    is_padding: bool = False
    """A padding row, for a rank without rows: it takes part in the forward and backward pass, but has no loss."""

    @property
    def num_tokens(self) -> int:
        return len(self.trajectory.prompt_ids) + len(self.trajectory.response_ids)


@dataclass(frozen=True, slots=True)
class Shard:
    """The rows of one rank in one RL step."""

    num_groups: int
    """Number of groups in the step, over all ranks."""
    updates: tuple[tuple[LearnRow, ...], ...]
    """The rows of each optimizer step, at least one; all ranks have the same number of steps."""


def shard_groups(
    groups: Sequence[Group], config: AdvantageConfig, num_updates: int, num_ranks: int, seed: int
) -> list[Shard]:
    """The groups of an RL step as one shard for each rank.

    Whole groups are assigned to optimizer steps (`deal_groups`, independent of the number of ranks), and the rows of an
    optimizer step are then balanced over the ranks by number of tokens.
    """
    rows = iter(learn_rows(groups, config))
    of_group = [[next(rows) for _ in group.trajectories] for group in groups]
    updates = [
        [row for place in places for row in of_group[place]] for places in deal_groups(groups, num_updates, seed)
    ]
    return _shards(len(groups), updates, num_ranks)


def shard_rows(trajectories: Sequence[Trajectory], num_ranks: int) -> list[Shard]:
    """Rows without groups (demonstrations), in one optimizer step."""
    return _shards(0, [[LearnRow(row) for row in trajectories]], num_ranks)


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


def learn_rows(groups: Sequence[Group], config: AdvantageConfig) -> list[LearnRow]:
    """All rows, group after group, with their advantages."""
    members = [(index, group, row) for index, group in enumerate(groups) for row in group.trajectories]
    by_group = isinstance(config, GroupAdvantage)
    advantages = row_advantages(groups, config).tolist() if by_group else [0.0] * len(members)
    return [
        LearnRow(row, index, advantage, group.accuracy)
        for (index, group, row), advantage in zip(members, advantages, strict=True)
    ]


def _shards(num_groups: int, updates: Sequence[Sequence[LearnRow]], num_ranks: int) -> list[Shard]:
    per_update = [_balanced(rows, num_ranks) for rows in updates]
    return [Shard(num_groups, tuple(tuple(ranks[rank]) for ranks in per_update)) for rank in range(num_ranks)]


def _balanced(rows: Sequence[LearnRow], num_ranks: int) -> list[list[LearnRow]]:
    """The rows of each rank: longest first to the rank with the fewest tokens (at most 4/3 of the best, Graham 1969).

    Rows keep their order within a rank. A rank without rows gets a copy of the shortest as a padding row.
    """
    placed: list[list[int]] = [[] for _ in range(num_ranks)]
    load = [0] * num_ranks
    for place in sorted(range(len(rows)), key=lambda place: (-rows[place].num_tokens, place)):
        rank = min(range(num_ranks), key=lambda rank: (load[rank], rank))
        placed[rank].append(place)
        load[rank] += rows[place].num_tokens
    padding = replace(min(rows, key=lambda row: row.num_tokens), is_padding=True)
    return [[rows[place] for place in sorted(places)] or [padding] for places in placed]

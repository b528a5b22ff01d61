"""Shards rows over the ranks of the trainer.

A response can go to any rank: whatever depends on several (denominators, whitening, metrics) is summed over ranks.
A response is one row, or a row for each context of its episode (`Trajectory.branches`).
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from luffy.types import Trajectory


@dataclass(frozen=True, slots=True)
class Shard:
    """The rows of one rank in a step, in the order of their optimizer steps."""

    rows: tuple[Trajectory, ...]
    groups: tuple[int, ...]
    """For each row, the index of its group in the step."""
    episodes: tuple[int, ...]
    """For each row, the index of its response in the step: the rows of an episode with several contexts share it."""
    advantages: tuple[float, ...]
    """For each row, its advantage before scaling; 0 where a critic gives one to each token."""
    updates: tuple[range, ...]
    """The rows of each optimizer step, possibly none; later passes repeat those of earlier steps. All ranks have the
    same number of steps."""
    accuracies: tuple[float, ...]
    """Share of correct rollouts of every group in the step, also of groups whose rows are on other ranks."""

    def part(self, updates: Sequence[Sequence[int]]) -> "Shard":
        """The shard with only the rows of `updates`, one sequence of row indices for each optimizer step."""
        order = [row for update in updates for row in update]
        ends = itertools.accumulate(map(len, updates))
        return Shard(
            rows=tuple(self.rows[row] for row in order),
            groups=tuple(self.groups[row] for row in order),
            episodes=tuple(self.episodes[row] for row in order),
            advantages=tuple(self.advantages[row] for row in order),
            updates=tuple(range(end - len(update), end) for update, end in zip(updates, ends, strict=True)),
            accuracies=self.accuracies,
        )


def shard_rows(rows: Sequence[Trajectory], num_ranks: int) -> list[Shard]:
    """Rows without groups (demonstrations), in one optimizer step."""
    sequences, episodes = branches_of(rows)
    count = len(sequences)
    whole = Shard(sequences, (0,) * count, episodes, (0.0,) * count, (range(count),), accuracies=(0.0,))
    return over_ranks(whole, whole.updates, num_ranks)


def branches_of(responses: Sequence[Trajectory]) -> tuple[tuple[Trajectory, ...], tuple[int, ...]]:
    """The sequences of all responses, in order, and for each the index of its response."""
    numbered = [(row, index) for index, response in enumerate(responses) for row in response.branches()]
    return tuple(row for row, _ in numbered), tuple(index for _, index in numbered)


def over_ranks(whole: Shard, updates: Sequence[Sequence[int]], num_ranks: int) -> list[Shard]:
    """A shard for each rank, with its part of the rows of every optimizer step, balanced by number of tokens."""
    balanced = [_balanced(whole, update, num_ranks) for update in updates]
    return [whole.part([of_rank[rank] for of_rank in balanced]) for rank in range(num_ranks)]


def _balanced(whole: Shard, update: Sequence[int], num_ranks: int) -> list[list[int]]:
    """The rows of an optimizer step for each rank: the longest response first, to the rank with the fewest tokens.

    The fullest rank has at most 4/3 of the tokens of the best split (Graham 1969). The rows of a response stay
    together, since its rank counts its tokens. Rows keep their order within a rank.
    """
    responses: dict[int, list[int]] = {}
    for row in update:
        responses.setdefault(whole.episodes[row], []).append(row)
    length = {index: sum(whole.rows[row].num_tokens for row in rows) for index, rows in responses.items()}
    placed: list[list[int]] = [[] for _ in range(num_ranks)]
    load = [0] * num_ranks
    for index in sorted(responses, key=lambda index: (-length[index], index)):
        rank = min(range(num_ranks), key=lambda rank: (load[rank], rank))
        placed[rank] += responses[index]
        load[rank] += length[index]
    return [sorted(of_rank) for of_rank in placed]

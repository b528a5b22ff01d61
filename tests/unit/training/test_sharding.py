"""Rows over optimizer steps and ranks: each once, whole groups an update, tokens balanced."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from luffy.config.objective import GeneralizedAdvantage, GroupMeanAdvantage
from luffy.training.batching import Shard, row_advantages, shard_groups, shard_rows
from luffy.types import FinishReason, Group, Outcome, Source, Trajectory

MEAN = GroupMeanAdvantage(kind="group_mean", population="joint", scale_by_std=False)
LENGTHS = st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=5), min_size=1, max_size=7)


def _row(length: int, reward: float = 0.0) -> Trajectory:
    return Trajectory(
        prompt_ids=(1, 2),
        response_ids=(3,) * length,
        source=(Source.ON_POLICY,) * length,
        logp_behavior=(-1.0,) * length,
        weight_version=(0,) * length,
        reward=reward,
        outcome=Outcome.CORRECT if reward else Outcome.WRONG,
        finish_reason=FinishReason.STOP,
    )


def _groups(lengths: list[list[int]]) -> list[Group]:
    return [
        Group(str(g), tuple(_row(length, reward=float(i % 2)) for i, length in enumerate(of_group)))
        for g, of_group in enumerate(lengths)
    ]


def _keys(shard: Shard, update: int) -> list[tuple[int, int, float]]:
    """Group, length and reward of each row of an update."""
    rows = shard.updates[update]
    return [(shard.groups[i], len(shard.rows[i].response_ids), shard.rows[i].reward) for i in rows]


@given(lengths=LENGTHS, num_updates=st.integers(1, 4), num_ranks=st.integers(1, 4))
def test_every_row_is_learned_once_in_the_update_of_its_group(
    lengths: list[list[int]], num_updates: int, num_ranks: int
) -> None:
    shards = shard_groups(_groups(lengths), MEAN, num_updates, num_ranks, seed=3)
    (alone,) = shard_groups(_groups(lengths), MEAN, num_updates, 1, seed=3)
    assert {len(shard.accuracies) for shard in shards} == {len(lengths)}
    assert {len(shard.updates) for shard in shards} == {len(alone.updates)} == {min(num_updates, len(lengths))}
    updates = range(len(alone.updates))
    assert sorted(key for update in updates for key in _keys(alone, update)) == sorted(
        (g, length, float(i % 2)) for g, of_group in enumerate(lengths) for i, length in enumerate(of_group)
    )
    for update in updates:
        assert Counter(key for shard in shards for key in _keys(shard, update)) == Counter(_keys(alone, update))
    for shard in shards:
        assert [row for update in shard.updates for row in update] == list(range(len(shard.rows)))


@given(lengths=LENGTHS, num_ranks=st.integers(1, 4))
def test_the_fullest_rank_is_within_a_third_of_what_is_possible(lengths: list[list[int]], num_ranks: int) -> None:
    shards = shard_groups(_groups(lengths), MEAN, 1, num_ranks, seed=3)
    loads = [sum(row.num_tokens for row in shard.rows) for shard in shards]
    longest = max(length + 2 for of_group in lengths for length in of_group)
    least = max(sum(loads) / num_ranks, longest)  # nobody can do better than this
    assert max(loads) <= least * 4 / 3 + longest / 3


def test_rows_carry_the_advantage_and_the_accuracy_of_their_group() -> None:
    groups = [Group("a", (_row(3, 1.0), _row(9, 0.0), _row(4, 0.0), _row(4, 0.0))), Group("b", (_row(2), _row(2)))]
    shards = shard_groups(groups, MEAN, num_updates=1, num_ranks=2, seed=3)
    found = Counter(
        (group, len(row.response_ids), advantage)
        for shard in shards
        for row, group, advantage in zip(shard.rows, shard.groups, shard.advantages, strict=True)
    )
    assert found == Counter([(0, 3, 0.75), (0, 9, -0.25), (0, 4, -0.25), (0, 4, -0.25), (1, 2, 0.0), (1, 2, 0.0)])
    assert {shard.accuracies for shard in shards} == {(0.25, 0.0)}


def test_a_critic_s_rows_have_no_advantage_yet() -> None:
    (shard,) = shard_groups([Group("a", (_row(3, 1.0), _row(9)))], GeneralizedAdvantage(kind="gae"), 1, 1, seed=3)
    assert shard.advantages == (0.0, 0.0)


@pytest.mark.parametrize("num_ranks", [1, 2, 5])
def test_ranks_without_a_row_take_part_in_every_update(num_ranks: int) -> None:
    shards = shard_rows([_row(9), _row(4)], num_ranks)
    assert sum(len(shard.rows) for shard in shards) == 2
    assert max(len(shard.rows) for shard in shards) == (2 if num_ranks == 1 else 1)
    assert all(shard.updates == (range(len(shard.rows)),) for shard in shards)


@given(lengths=LENGTHS, num_updates=st.integers(1, 3), num_ranks=st.integers(1, 3))
def test_the_contexts_of_an_episode_share_update_rank_and_advantage(
    lengths: list[list[int]], num_updates: int, num_ranks: int
) -> None:
    """Every second episode has a context of one token before each of its tokens but the first."""
    whole = _groups(lengths)
    groups = [
        Group(group.uid, tuple(_cut(row) if i % 2 else row for i, row in enumerate(group.trajectories)))
        for group in whole
    ]
    shards = shard_groups(groups, MEAN, num_updates, num_ranks, seed=3)
    expected = row_advantages(whole, MEAN).tolist()
    places: dict[int, set[tuple[int, int]]] = {}
    learned: Counter[int] = Counter()
    for rank, shard in enumerate(shards):
        for update, rows in enumerate(shard.updates):
            for row in rows:
                places.setdefault(shard.episodes[row], set()).add((rank, update))
                learned[shard.episodes[row]] += shard.rows[row].num_learnable
                assert shard.advantages[row] == pytest.approx(expected[shard.episodes[row]])
                assert Source.ENVIRONMENT not in shard.rows[row].source
    assert all(len(found) == 1 for found in places.values())
    assert [learned[i] for i in range(len(expected))] == [length for of_group in lengths for length in of_group]


def _cut(row: Trajectory) -> Trajectory:
    """The row with a context of its own for each token but the first."""
    length = len(row.response_ids)
    return replace(
        row,
        response_ids=(3, *(9, 3) * (length - 1)),
        source=(Source.ON_POLICY, *(Source.ENVIRONMENT, Source.ON_POLICY) * (length - 1)),
        logp_behavior=(-1.0,) * (2 * length - 1),
        weight_version=(0,) * (2 * length - 1),
        context_starts=tuple(range(1, 2 * length - 1, 2)),
    )

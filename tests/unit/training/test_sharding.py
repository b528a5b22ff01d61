"""Rows over optimizer steps and ranks: each once, whole groups an update, tokens balanced."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from luffy.config.objective import GeneralizedAdvantage, GroupMeanAdvantage
from luffy.training.sharding import LearnRow, shard_groups, shard_rows
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


def _key(row: LearnRow) -> tuple[int, int, float]:
    return row.group, len(row.trajectory.response_ids), row.trajectory.reward


@given(lengths=LENGTHS, num_updates=st.integers(1, 4), num_ranks=st.integers(1, 4))
def test_every_row_is_learned_once_in_the_update_of_its_group(
    lengths: list[list[int]], num_updates: int, num_ranks: int
) -> None:
    shards = shard_groups(_groups(lengths), MEAN, num_updates, num_ranks, seed=3)
    (alone,) = shard_groups(_groups(lengths), MEAN, num_updates, 1, seed=3)
    assert {shard.num_groups for shard in shards} == {len(lengths)}
    assert {len(shard.updates) for shard in shards} == {len(alone.updates)} == {min(num_updates, len(lengths))}
    assert sorted(_key(row) for update in alone.updates for row in update) == sorted(
        (g, length, float(i % 2)) for g, of_group in enumerate(lengths) for i, length in enumerate(of_group)
    )
    for update, rows in enumerate(alone.updates):
        parts = [shard.updates[update] for shard in shards]
        assert all(parts), "a rank without a row would not keep step"
        assert Counter(_key(row) for part in parts for row in part if not row.is_padding) == Counter(map(_key, rows))
        assert not any(row.is_padding for row in rows)


@given(lengths=LENGTHS, num_ranks=st.integers(1, 4))
def test_the_fullest_rank_is_within_a_third_of_what_is_possible(lengths: list[list[int]], num_ranks: int) -> None:
    shards = shard_groups(_groups(lengths), MEAN, 1, num_ranks, seed=3)
    loads = [sum(row.num_tokens for row in shard.updates[0] if not row.is_padding) for shard in shards]
    longest = max(length + 2 for of_group in lengths for length in of_group)
    least = max(sum(loads) / num_ranks, longest)  # nobody can do better than this
    assert max(loads) <= least * 4 / 3 + longest / 3


def test_rows_carry_the_advantage_and_the_accuracy_of_their_group() -> None:
    groups = [Group("a", (_row(3, 1.0), _row(9, 0.0), _row(4, 0.0), _row(4, 0.0))), Group("b", (_row(2), _row(2)))]
    shards = shard_groups(groups, MEAN, num_updates=1, num_ranks=2, seed=3)
    rows = [row for shard in shards for row in shard.updates[0]]
    of_a = {len(row.trajectory.response_ids): row for row in rows if row.group == 0}
    assert of_a[3].advantage == 0.75
    assert of_a[9].advantage == of_a[4].advantage == -0.25
    assert {row.group_accuracy for row in rows if row.group == 0} == {0.25}
    assert {(row.advantage, row.group_accuracy) for row in rows if row.group == 1} == {(0.0, 0.0)}


def test_a_critic_s_rows_have_no_advantage_yet() -> None:
    (shard,) = shard_groups([Group("a", (_row(3, 1.0), _row(9)))], GeneralizedAdvantage(kind="gae"), 1, 1, seed=3)
    assert [row.advantage for row in shard.updates[0]] == [0.0, 0.0]


@pytest.mark.parametrize("num_ranks", [1, 2, 5])
def test_ranks_without_a_row_stand_in_with_the_shortest(num_ranks: int) -> None:
    shards = shard_rows([_row(9), _row(4)], num_ranks)
    padding = [row.is_padding for shard in shards for row in shard.updates[0]]
    assert padding.count(False) == 2
    assert padding.count(True) == max(num_ranks - 2, 0)
    assert all(row.num_tokens == 6 for shard in shards for row in shard.updates[0] if row.is_padding)

"""From groups to micro-batches: rows over optimizer steps and ranks, and layout in which no token is lost or moved."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference.gradient_case import trajectories
from synthetic.trajectories import row_of

from luffy.config.group import GeneralizedAdvantage, GroupMeanAdvantage
from luffy.training.batching import (
    Shard,
    collate,
    deal_groups,
    dummy_micro_batch,
    has_demonstration,
    has_prefix_row,
    order_of_passes,
    row_advantages,
    shard_groups,
    shard_rows,
    split_into_micro_batches,
    stream_indices,
    take_rows,
)
from luffy.training.ranks import LocalRanks, call_everywhere
from luffy.types import Group, Source, TrainBatch, Trajectory

MEAN = GroupMeanAdvantage(kind="group_mean", population="joint", scale_by_std=False)
LENGTHS = st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=5), min_size=1, max_size=7)


def _row(length: int, reward: float = 0.0) -> Trajectory:
    return row_of(reward, (3,) * length, prompt_ids=(1, 2))


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
def test_every_row_is_learned_once_in_the_update_of_its_group(lengths, num_updates, num_ranks):
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
    (critics,) = shard_groups(groups, GeneralizedAdvantage(kind="gae"), 1, 1, seed=3)
    assert set(critics.advantages) == {0.0}, "a critic gives them later"


@pytest.mark.parametrize("num_ranks", [1, 2, 5])
def test_ranks_without_a_row_take_part_in_every_update(num_ranks: int) -> None:
    shards = shard_rows([_row(9), _row(4)], num_ranks)
    assert sum(len(shard.rows) for shard in shards) == 2
    assert max(len(shard.rows) for shard in shards) == (2 if num_ranks == 1 else 1)
    assert all(shard.updates == (range(len(shard.rows)),) for shard in shards)


@given(lengths=LENGTHS, num_updates=st.integers(1, 3), num_ranks=st.integers(1, 3))
def test_the_contexts_of_an_episode_share_update_rank_and_advantage(lengths, num_updates, num_ranks):
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


OWN, TRACE, EARLIER = (row_of(1.0, (2, 3), source) for source in (Source.ON_POLICY, Source.OFF_POLICY, Source.REPLAY))
HINT = row_of(1.0, (2, 3), (Source.OFF_POLICY, Source.ON_POLICY))
ROWS = {
    "plain": (OWN,), "replayed": (OWN, EARLIER), "demonstrated": (OWN, TRACE), "hinted": (OWN, HINT),
    "replayed and demonstrated": (OWN, TRACE, EARLIER),
}  # fmt: skip
# No objective combines replay with prefixes, nor prefixes with whole traces.
WITH_TRACES = st.sampled_from(["plain", "replayed", "demonstrated", "replayed and demonstrated"])
WITH_HINTS = st.sampled_from(["plain", "hinted"])


def _groups_of(kinds: list[str]) -> list[Group]:
    return [Group(kind, ROWS[kind]) for kind in kinds]


@given(
    kinds=st.one_of(st.lists(WITH_TRACES, max_size=20), st.lists(WITH_HINTS, max_size=20)),
    num_updates=st.integers(1, 6),
    seed=st.integers(0, 2**63 - 1),
)
def test_every_kind_is_spread_evenly_whatever_the_groups(kinds: list[str], num_updates: int, seed: int) -> None:
    groups = _groups_of(kinds)
    dealt = deal_groups(groups, num_updates, seed)
    assert sorted(place for places in dealt for place in places) == list(range(len(groups)))
    assert len(dealt) == min(num_updates, len(groups))
    assert all(places == sorted(places) for places in dealt)  # so one update takes the groups as they come
    for is_kind in (lambda group: True, lambda group: group.is_replayed, has_prefix_row, has_demonstration):
        counts = [sum(is_kind(groups[place]) for place in places) for places in dealt]
        assert max(counts, default=0) - min(counts, default=0) <= 1


def test_groups_of_one_kind_are_dealt_at_random_and_no_update_is_favoured() -> None:
    """Nine groups into two updates: each pair of neighbours is parted as often as chance parts it, 5/9 of the time."""
    groups = _groups_of(["plain"] * 9)
    parted, larger = Counter(), Counter()
    for seed in range(4000):
        first, second = deal_groups(groups, 2, seed)
        larger[len(first) > len(second)] += 1
        parted.update(place for place in range(8) if (place in first) != (place + 1 in first))
    error = (5 / 9 * 4 / 9 / 4000) ** 0.5
    assert all(parted[place] / 4000 == pytest.approx(5 / 9, abs=4 * error) for place in range(8))
    assert larger[True] / 4000 == pytest.approx(0.5, abs=4 * (0.25 / 4000) ** 0.5)


@given(num_updates=st.integers(1, 6), passes=st.integers(1, 5), seed=st.integers(0, 2**63 - 1))
def test_every_pass_takes_every_mini_batch_once_and_the_first_as_they_were_dealt(num_updates, passes, seed):
    order = order_of_passes(num_updates, passes, seed)
    each = [order[start : start + num_updates] for start in range(0, len(order), num_updates)]
    assert each[0] == list(range(num_updates))
    assert [sorted(one) for one in each] == [list(range(num_updates))] * passes


def test_later_passes_and_epochs_have_orders_of_their_own() -> None:
    last = Counter(order_of_passes(3, 2, seed)[-1] for seed in range(3000))
    assert all(last[update] == pytest.approx(1000, abs=110) for update in range(3))
    first, other_seed, second = (stream_indices(50, *where) for where in ((0, 50, 1), (0, 50, 2), (50, 50, 1)))
    assert other_seed != first != second


@given(num_items=st.integers(1, 30), batch_size=st.integers(1, 40), epochs=st.integers(1, 3))
def test_every_item_comes_once_an_epoch(num_items: int, batch_size: int, epochs: int) -> None:
    steps = -(-num_items * epochs // batch_size)
    stream = [i for step in range(steps) for i in stream_indices(num_items, step * batch_size, batch_size, seed=3)]
    for epoch in range(epochs):
        assert sorted(stream[epoch * num_items : (epoch + 1) * num_items]) == list(range(num_items))


def _batch(num_groups: int) -> tuple[TrainBatch, torch.Tensor]:
    """Groups of LUFFY, and `(1, B, T)` weights that number the places from 1."""
    rows, _ = trajectories("luffy", num_groups)
    batch = collate(rows, torch.zeros(len(rows)), pad_id=0)
    num_rows, width = batch.input_ids_BT.shape
    return batch, torch.arange(1, num_rows * width + 1, dtype=torch.float64).view(1, num_rows, width)


@settings(deadline=None, max_examples=40)
@given(max_tokens=st.integers(1, 200), packing=st.booleans(), num_groups=st.integers(1, 4))
def test_every_real_token_is_in_one_micro_batch_within_the_budget(
    max_tokens: int, packing: bool, num_groups: int
) -> None:
    batch, weight = _batch(num_groups)
    micros = split_into_micro_batches(batch, weight, max_tokens, packing)
    seen = torch.cat([place_KBT[0][micro.attention_mask_BT] for micro, place_KBT in micros])
    assert sorted(seen.tolist()) == sorted(weight[0][batch.attention_mask_BT].tolist())
    for micro, place_KBT in micros:
        mask = micro.attention_mask_BT
        ids = batch.input_ids_BT.flatten()[(place_KBT[0][mask] - 1).long()]
        assert torch.equal(ids, micro.input_ids_BT[mask])
        assert micro.input_ids_BT.numel() <= max(max_tokens, 40)  # or one row that is longer


@pytest.mark.parametrize("packing", [False, True])
def test_a_width_that_has_to_be_a_multiple_adds_padding_without_weight_at_the_end(packing: bool) -> None:
    batch, weight = _batch(2)
    plain, wide = (split_into_micro_batches(batch, weight, 40, packing, multiple) for multiple in (1, 7))
    for (micro, place_KBT), (wider, wider_place_KBT) in zip(plain, wide, strict=True):
        width = micro.input_ids_BT.shape[1]
        assert wider.input_ids_BT.shape[1] == width + -width % 7
        assert torch.equal(wider.input_ids_BT[:, :width], micro.input_ids_BT)
        assert torch.equal(wider_place_KBT[..., :width], place_KBT)
        assert not wider_place_KBT[..., width:].any() and not wider.attention_mask_BT[:, width:].any()
        assert not wider.position_ids_BT[:, width:].any()  # packed: sequences of one token each
    assert dummy_micro_batch(batch, weight, 7)[0].input_ids_BT.shape == (1, 7)


def test_packed_positions_restart_at_every_sequence_and_rows_are_trimmed_to_the_longest_taken() -> None:
    batch, weight = _batch(1)
    ((micro, _),) = split_into_micro_batches(batch, weight, 10_000, packing=True)
    lengths = sorted(batch.attention_mask_BT.sum(dim=-1).tolist(), reverse=True)
    assert micro.position_ids_BT[0].tolist() == [t for length in lengths for t in range(length)]
    shortest = int(batch.attention_mask_BT.sum(dim=-1).argmin())
    assert take_rows(batch, [shortest]).attention_mask_BT.all()


def test_all_ranks_get_the_same_arguments_and_the_first_answers() -> None:
    class SixRanks(LocalRanks[int]):
        num_ranks = 6

        def call(self, method, arguments):  # one after the other
            return [method(rank, *of_rank) for rank, of_rank in enumerate(arguments)]

    received = list[tuple[int, str]]()
    assert call_everywhere(SixRanks(0), lambda *given: received.append(given) or given[0], "all") == 0
    assert received == [(rank, "all") for rank in range(6)]

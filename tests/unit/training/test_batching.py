"""Layout: no token is lost or moved by collating, padding or packing."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference.gradient_case import trajectories

from luffy.training.batching import collate, dummy_micro_batch, split_into_micro_batches, take_rows


def _index_weights(shape: tuple[int, int]) -> torch.Tensor:
    """A weight for each place that names it."""
    return torch.arange(1, shape[0] * shape[1] + 1, dtype=torch.float64).view(1, *shape)


@settings(deadline=None, max_examples=40)
@given(max_tokens=st.integers(1, 200), packing=st.booleans(), num_groups=st.integers(1, 4))
def test_every_real_token_is_in_exactly_one_micro_batch(max_tokens: int, packing: bool, num_groups: int) -> None:
    rows, _ = trajectories("luffy", num_groups)
    batch = collate(rows, torch.zeros(len(rows)), pad_id=0)
    weight = _index_weights(tuple(batch.input_ids_BT.shape))
    micros = split_into_micro_batches(batch, weight, max_tokens, packing)
    seen = torch.cat([place_KBT[0][micro.attention_mask_BT] for micro, place_KBT in micros])
    assert sorted(seen.tolist()) == sorted(weight[0][batch.attention_mask_BT].tolist())
    for micro, place_KBT in micros:
        mask = micro.attention_mask_BT
        ids = batch.input_ids_BT.flatten()[(place_KBT[0][mask] - 1).long()]
        assert torch.equal(ids, micro.input_ids_BT[mask])


@settings(deadline=None, max_examples=40)
@given(max_tokens=st.integers(40, 200), packing=st.booleans())
def test_micro_batches_keep_the_token_budget(max_tokens: int, packing: bool) -> None:
    rows, _ = trajectories("luffy", 4)
    batch = collate(rows, torch.zeros(len(rows)), pad_id=0)
    weight = _index_weights(tuple(batch.input_ids_BT.shape))
    for micro, _ in split_into_micro_batches(batch, weight, max_tokens, packing):
        assert micro.input_ids_BT.numel() <= max_tokens


@pytest.mark.parametrize("packing", [False, True])
def test_a_width_that_ranks_can_share_adds_padding_without_weight_at_the_end(packing: bool) -> None:
    rows, _ = trajectories("luffy", 2)
    batch = collate(rows, torch.zeros(len(rows)), pad_id=0)
    weight = _index_weights(tuple(batch.input_ids_BT.shape))
    plain, wide = (split_into_micro_batches(batch, weight, 40, packing, multiple) for multiple in (1, 7))
    for (micro, place_KBT), (wider, wider_place_KBT) in zip(plain, wide, strict=True):
        width = micro.input_ids_BT.shape[1]
        assert wider.input_ids_BT.shape[1] == width + -width % 7
        assert torch.equal(wider.input_ids_BT[:, :width], micro.input_ids_BT)
        assert torch.equal(wider_place_KBT[..., :width], place_KBT)
        assert not wider_place_KBT[..., width:].any() and not wider.attention_mask_BT[:, width:].any()
        assert not wider.position_ids_BT[:, width:].any()  # packed: sequences of one token each
    assert dummy_micro_batch(batch, weight, 7)[0].input_ids_BT.shape == (1, 7)


def test_packed_positions_restart_at_every_sequence() -> None:
    rows, _ = trajectories("luffy", 1)
    batch = collate(rows, torch.zeros(len(rows)), pad_id=0)
    ((micro, _),) = split_into_micro_batches(
        batch, _index_weights(tuple(batch.input_ids_BT.shape)), 10_000, packing=True
    )
    lengths = sorted((len(row.prompt_ids) + len(row.response_ids) for row in rows), reverse=True)
    assert micro.position_ids_BT[0].tolist() == [t for length in lengths for t in range(length)]


def test_take_rows_trims_to_the_longest_row_left() -> None:
    rows, _ = trajectories("luffy", 2)
    batch = collate(rows, torch.zeros(len(rows)), pad_id=0)
    shortest = min(range(len(rows)), key=lambda b: int(batch.attention_mask_BT[b].sum()))
    assert take_rows(batch, [shortest]).attention_mask_BT.all()

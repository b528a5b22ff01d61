"""The cache with spare room holds what transformers' own holds."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference.attention_case import CONFIGS
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from luffy.rollout.transformers_engine import RoomyLayer, roomy_cache


@settings(deadline=None, max_examples=40)
@given(
    steps=st.lists(
        st.tuples(st.integers(1, 90), st.lists(st.integers(0, 3), max_size=4, unique=True)), min_size=1, max_size=6
    )
)
def test_it_holds_what_concatenation_holds(steps: list[tuple[int, list[int]]]) -> None:
    """Each step adds some tokens, and may then keep only some rows."""
    plain, roomy, rows = DynamicLayer(), RoomyLayer(), 4
    generator = torch.Generator().manual_seed(0)
    for tokens, kept in steps:
        keys, values = torch.randn(2, rows, 2, tokens, 3, generator=generator)
        for found, expected in zip(roomy.update(keys, values), plain.update(keys, values), strict=True):
            assert torch.equal(found, expected)
        kept = [row for row in kept if row < rows]
        if kept:
            rows = len(kept)
            for layer in (plain, roomy):
                layer.batch_select_indices(torch.tensor(kept))
        assert roomy.get_seq_length() == plain.get_seq_length() and roomy.keys.shape == plain.keys.shape


def test_most_steps_write_in_place() -> None:
    layer, places = RoomyLayer(), set()
    for _ in range(130):
        places.add(layer.update(*torch.ones(2, 1, 1, 1, 2))[0].data_ptr())
    assert len(places) == 2


def test_windowed_layers_keep_their_own_cache() -> None:
    kinds = [type(layer) for layer in roomy_cache(CONFIGS["qwen2, half windowed"]).layers]
    assert kinds == [RoomyLayer, DynamicSlidingWindowLayer]
    assert isinstance(roomy_cache(CONFIGS["llama"]), DynamicCache)

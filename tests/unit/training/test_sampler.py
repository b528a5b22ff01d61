"""Batches as a pure function of the step."""

from hypothesis import given
from hypothesis import strategies as st

from luffy.training.batching import batch_indices


@given(num_items=st.integers(1, 30), batch_size=st.integers(1, 40), epochs=st.integers(1, 3))
def test_every_item_comes_once_an_epoch(num_items: int, batch_size: int, epochs: int) -> None:
    steps = -(-num_items * epochs // batch_size)
    stream = [i for step in range(steps) for i in batch_indices(num_items, batch_size, step, seed=3)]
    for epoch in range(epochs):
        assert sorted(stream[epoch * num_items : (epoch + 1) * num_items]) == list(range(num_items))


def test_seed_and_epoch_change_the_order() -> None:
    assert batch_indices(50, 50, 0, seed=1) != batch_indices(50, 50, 0, seed=2)
    assert batch_indices(50, 50, 0, seed=1) != batch_indices(50, 50, 1, seed=1)

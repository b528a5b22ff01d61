"""Stateless sampling: the items of a step are a pure function of the position in a stream."""

import torch

from luffy.seeds import derive_seed


def batch_indices(num_items: int, batch_size: int, step: int, seed: int) -> list[int]:
    """Items of step `step` (from 0), in batches of equal size."""
    return stream_indices(num_items, step * batch_size, batch_size, seed)


def stream_indices(num_items: int, first: int, count: int, seed: int) -> list[int]:
    """`count` items from position `first` (from 0) of a stream of epochs, each shuffled anew.

    Each epoch holds every item once; the positions may span epochs.
    """
    indices: list[int] = []
    epoch, offset = divmod(first, num_items)
    while len(indices) < count:
        generator = torch.Generator().manual_seed(derive_seed(seed, "epoch", epoch))
        order = torch.randperm(num_items, generator=generator).tolist()
        indices += order[offset : offset + count - len(indices)]
        epoch, offset = epoch + 1, 0
    return indices

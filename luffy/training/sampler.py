"""Which items make a step: a pure function of the position in a stream, so that resuming needs no sampler state."""

import torch

from luffy.seeds import derive_seed


def batch_indices(num_items: int, batch_size: int, step: int, seed: int) -> list[int]:
    """Items of step `step` (counted from 0) of the stream, in batches of equal size."""
    return stream_indices(num_items, step * batch_size, batch_size, seed)


def stream_indices(num_items: int, first: int, count: int, seed: int) -> list[int]:
    """`count` items from position `first` (from 0) of a stream of freshly shuffled epochs laid end to end.

    Every item is used once before any is used again; the positions may span epochs.
    """
    indices: list[int] = []
    epoch, offset = divmod(first, num_items)
    while len(indices) < count:
        generator = torch.Generator().manual_seed(derive_seed(seed, "epoch", epoch))
        order = torch.randperm(num_items, generator=generator).tolist()
        indices += order[offset : offset + count - len(indices)]
        epoch, offset = epoch + 1, 0
    return indices

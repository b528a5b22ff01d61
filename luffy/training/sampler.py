"""Which items make a step: a pure function of the step, so that resuming needs no sampler state."""

import torch

from luffy.seeds import derive_seed


def batch_indices(num_items: int, batch_size: int, step: int, seed: int) -> list[int]:
    """Items of step `step` (counted from 0) in a stream of freshly shuffled epochs laid end to end.

    Every item is used once before any is used again; a step may span two epochs.
    """
    first = step * batch_size
    indices: list[int] = []
    epoch, offset = divmod(first, num_items)
    while len(indices) < batch_size:
        generator = torch.Generator().manual_seed(derive_seed(seed, "epoch", epoch))
        order = torch.randperm(num_items, generator=generator).tolist()
        indices += order[offset : offset + batch_size - len(indices)]
        epoch, offset = epoch + 1, 0
    return indices

"""The seam to data-parallel training: objectives sum over ranks without knowing how."""

from collections.abc import Callable

from torch import Tensor

SumOverRanks = Callable[[Tensor], Tensor]
"""Gives the sum of a tensor over all data-parallel ranks, the same on each."""

"""The interface to data-parallel training: objectives sum over ranks through a function that they are given."""

from collections.abc import Callable

from torch import Tensor

SumOverRanks = Callable[[Tensor], Tensor]
"""Gives the sum of a tensor over all data-parallel ranks, the same on each."""

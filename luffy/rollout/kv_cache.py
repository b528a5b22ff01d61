"""A KV cache with spare room, so that a decoding step writes its own keys and values and copies no others.

transformers' `DynamicCache` concatenates: every step copies the whole cache, a quadratic amount of memory traffic.

Shape legend: `B` rows, `A` heads of keys and values, `T` tokens, `D` size of a head.
"""

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer

_SPARE_TOKENS = 64
"""Room for further tokens whenever the cache of a layer is enlarged."""


class RoomyLayer(DynamicLayer):
    """The `(B, A, T, D)` keys and values of one layer of full attention: the beginning of larger tensors."""

    def __init__(self) -> None:
        super().__init__()
        self._rooms: tuple[Tensor, ...] = ()

    def update(self, key_states: Tensor, value_states: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """Add new tokens; returns all keys and all values."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start = self.get_seq_length()
        end = start + key_states.shape[2]
        if not self._rooms or end > self._rooms[0].shape[2]:
            self._rooms = tuple(
                _enlarged(old, new, end) for old, new in ((self.keys, key_states), (self.values, value_states))
            )
        for room, new in zip(self._rooms, (key_states, value_states), strict=True):
            room[:, :, start:end] = new
        return self._show(end)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep only these rows, in this order."""
        self._rooms = tuple(room[indices] for room in self._rooms)
        self._show(self.get_seq_length())

    def _show(self, length: int) -> tuple[Tensor, Tensor]:
        self.keys, self.values = (room[:, :, :length] for room in self._rooms)
        return self.keys, self.values


def roomy_cache(config: PreTrainedConfig) -> DynamicCache:
    """An empty cache for a model of this configuration; layers of other kinds than full attention have their own."""
    cache = DynamicCache(config=config)
    cache.layers = [RoomyLayer() if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache


def _enlarged(old_BATD: Tensor | None, new_BATD: Tensor, length: int) -> Tensor:
    """A tensor for `length` tokens and some more that begins with the old ones."""
    rows, heads, _, size = new_BATD.shape
    room_BATD = torch.empty(rows, heads, length + _SPARE_TOKENS, size, dtype=new_BATD.dtype, device=new_BATD.device)
    if old_BATD is not None and old_BATD.numel():
        room_BATD[:, :, : old_BATD.shape[2]] = old_BATD
    return room_BATD

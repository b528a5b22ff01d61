"""Attention of ranks that share sequences: each exchanges its slice of all heads for whole rows of its share of heads.

DeepSpeed Ulysses, arXiv 2309.14509, section 3: an all-to-all of queries, keys and values before attention, and one of
its output after it.

Shape legend: `B` rows, `T` tokens, `A` attention heads, `D` size of a head.
"""

import math
from collections.abc import Callable
from typing import TypeAlias

from deepspeed.sequence.layer import DistributedAttention
from torch import Tensor, nn

from luffy.training.ranks import RankMesh

_TOKENS, _HEADS = 1, 2
"""Dimensions of the tensors that DeepSpeed exchanges, `(B, T, A, D)`."""


Attention: TypeAlias = Callable[..., tuple[Tensor, None]]
"""An entry of transformers' attention interface: from `(B, A, T, D)` to `(B, T, A, D)`."""


def over_slices(attend: Attention, mesh: RankMesh) -> Attention:
    """Attention of a slice's queries to whole rows, computed by `attend`; the ranks of a shard call it together.

    The number of slices has to divide the query heads. Key heads are repeated where it does not divide them.
    """

    def attend_slice(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        **settings: object,
    ) -> tuple[Tensor, None]:
        def attend_rows(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            rows = (tensor.transpose(_TOKENS, _HEADS) for tensor in (query, key, value))
            return attend(module, *rows, attention_mask, **settings)[0]

        exchange = DistributedAttention(attend_rows, mesh.same_shard, scatter_idx=_HEADS, gather_idx=_TOKENS)
        # The fewest repeats that give every slice the same number of key heads.
        repeats = math.lcm(key.shape[1], mesh.slices) // key.shape[1]
        heads = (query, *(tensor.repeat_interleave(repeats, dim=1) for tensor in (key, value)))
        found: Tensor = exchange(*(tensor.transpose(_TOKENS, _HEADS) for tensor in heads), batch_dim_idx=0)
        return found, None

    return attend_slice

"""Ranks that share sequences: their calls, and the models that they refuse. What they compute is in `integration/`."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from reference.attention_case import model_of, recurrent_model
from reference.gradient_case import execution

from luffy.errors import DataError
from luffy.training.attention import set_attention
from luffy.training.ranks import WHOLE_SEQUENCES, RankMesh, ShardRanks, call_everywhere


class SixRanks:
    """Ranks that are numbers, called one after the other."""

    num_ranks = 6
    num_gpus = 6

    def call(self, method: Callable[..., Any], arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        return [method(rank, *of_rank) for rank, of_rank in enumerate(arguments)]


def test_ranks_of_a_shard_get_the_same_arguments_and_answer_once() -> None:
    shards = ShardRanks(SixRanks(), slices=3)
    received: dict[int, str] = {}

    def take(rank: int, rows: str) -> int:
        received[rank] = rows
        return rank

    assert (shards.num_ranks, shards.num_gpus) == (2, 6)
    assert shards.call(take, [("first",), ("second",)]) == [0, 3]
    assert received == {0: "first", 1: "first", 2: "first", 3: "second", 4: "second", 5: "second"}
    assert call_everywhere(shards, take, "all") == 0
    assert set(received.values()) == {"all"}


def test_a_rank_that_shares_nothing_has_whole_sequences() -> None:
    scores_BT = torch.arange(10.0).view(2, 5)
    assert WHOLE_SEQUENCES.own_slice(scores_BT) is WHOLE_SEQUENCES.join(scores_BT) is scores_BT


def test_heads_that_cannot_be_shared_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("luffy.training.attention.rank_mesh", RankMesh)
    with pytest.raises(DataError, match="3 does not divide the 4 attention heads of Qwen2ForCausalLM; use a number"):
        set_attention(model_of("qwen2"), execution(sequence_parallel=3))


def test_a_model_with_attention_of_its_own_is_refused() -> None:
    with pytest.raises(DataError, match="sequence_parallel: 2 does not support FalconH1ForCausalLM"):
        set_attention(recurrent_model(), execution(sequence_parallel=2))

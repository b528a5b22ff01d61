"""Small models of several architectures, rows of given lengths, and attention written out in plain torch."""

import copy
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    FalconH1Config,
    FalconH1ForCausalLM,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from luffy.training.batching import collate
from luffy.training.supervised import demonstration
from luffy.types import TrainBatch, Trajectory
from reference.rows import evaluate

LENGTHS = ((3, 9), (1, 1), (6, 2), (2, 17), (4, 4))
"""Of prompt and response."""
WINDOW = 5
"""Tokens that a layer of `mistral` and the last layer of `qwen2, half windowed` see."""
_SHAPE = {
    "vocab_size": 23, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 16384, "initializer_range": 0.4, "tie_word_embeddings": False,
}  # fmt: skip
CONFIGS: dict[str, PreTrainedConfig] = {
    "qwen2": Qwen2Config(**_SHAPE),
    "qwen2, half windowed": Qwen2Config(
        **_SHAPE, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1
    ),
    "qwen3": Qwen3Config(**_SHAPE, head_dim=8),
    "llama": LlamaConfig(**_SHAPE),
    "mistral": MistralConfig(**_SHAPE, sliding_window=WINDOW),
}  # fmt: skip


def model_of(kind: str, attention: str = "sdpa") -> PreTrainedModel:
    torch.manual_seed(0)
    config = copy.deepcopy(CONFIGS[kind])  # the implementation of attention belongs to the configuration
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=torch.float32)


def recurrent_model() -> PreTrainedModel:
    torch.manual_seed(0)
    config = FalconH1Config(
        vocab_size=23, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, head_dim=8, mamba_d_ssm=16, mamba_n_heads=2, mamba_d_head=8, mamba_d_state=8,
        mamba_chunk_size=8, initializer_range=0.4, tie_word_embeddings=False,
    )  # fmt: skip
    return FalconH1ForCausalLM._from_config(config, attn_implementation="sdpa")


def rows_of(lengths: Sequence[tuple[int, int]], seed: int = 0) -> list[Trajectory]:
    """Random rows with these numbers of prompt and response tokens."""
    generator = torch.Generator().manual_seed(seed)

    def ids(length: int) -> list[int]:
        return torch.randint(1, 23, (length,), generator=generator).tolist()

    return [demonstration(ids(prompt), ids(response)) for prompt, response in lengths]


def batch_of(rows: Sequence[Trajectory]) -> TrainBatch:
    return collate(rows, torch.ones(len(rows)), pad_id=0)


def gradients_alone(kind: str, rows: Sequence[Trajectory]) -> dict[str, Tensor]:
    """Of the mean of -log p over all tokens: in float64, one sequence at a time, with every mask and score written."""
    model64 = model_of(kind, "eager").double()
    num_tokens = sum(len(row.response_ids) for row in rows)
    (-sum(evaluate(model64, row)[0].sum() for row in rows) / num_tokens).backward()
    return {name: parameter.grad for name, parameter in model64.named_parameters()}


def varlen_attention(
    query: Tensor, key: Tensor, value: Tensor, bounds: Sequence[int], scale: float, window: int | None
) -> Tensor:
    """What a flash kernel computes on `(T, A, D)` tensors of sequences between `bounds`, with every score written out.

    A query at position i sees the keys i - window + 1 to i of its own sequence.
    """
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    sequence = torch.bucketize(torch.arange(len(query)), torch.as_tensor(bounds), right=True)
    back = torch.arange(len(query))[:, None] - torch.arange(len(query))
    seen = (back >= 0) & (sequence[:, None] == sequence)
    if window is not None:
        seen &= back < window
    score = torch.einsum("qad,kad->aqk", query, key) * scale
    return torch.einsum("aqk,kad->qad", score.masked_fill(~seen, -torch.inf).softmax(dim=-1), value)

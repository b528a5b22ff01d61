"""Frozen models that score tokens: the reference of KL terms, and teachers.

Shape legend: `B` rows, `T` tokens.
"""

from typing import Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from luffy.config.execution import ExecutionConfig
from luffy.config.model import DType
from luffy.training.attention import compile_layers, set_attention
from luffy.training.deepspeed_engine import is_sharded, start_frozen_engine
from luffy.training.policy import Policy
from luffy.training.policy_model import PolicyModel, model_inputs, score
from luffy.training.ranks import device, rank_mesh
from luffy.types import TrainBatch


class ReferencePolicy(Protocol):
    """The policy that KL terms compare with."""

    def logprobs(self, batch: TrainBatch) -> Tensor:
        """`(B, T)` log-probabilities of the response tokens, 0 elsewhere."""
        ...


class UnadaptedPolicy:
    """The policy in training without its adapter: the policy that the stage starts from, without a copy of it."""

    def __init__(self, policy: Policy) -> None:
        assert policy.adapter is not None
        self._policy, self._adapter = policy, policy.adapter

    def logprobs(self, batch: TrainBatch) -> Tensor:
        """`(B, T)` log-probabilities of the response tokens, 0 elsewhere."""
        with self._adapter.disabled():
            return self._policy.logprobs(batch)


class FrozenPolicy:
    """A causal language model that only computes log-probabilities; whole on every rank, or sharded.

    Takes over `causal_lm`: moves it to the device and freezes it. It stays sharded where `load_to_train` has sharded
    it; every call is then a collective one. `temperature` is that of the trained policy.
    """

    def __init__(self, causal_lm: PreTrainedModel, execution: ExecutionConfig, temperature: float) -> None:
        causal_lm.eval()
        causal_lm.requires_grad_(False)
        mesh = rank_mesh(execution.sequence_parallel)
        model = PolicyModel(causal_lm, temperature, execution.logprob_chunk_tokens, mesh).to(device())
        dtype: DType = "bfloat16" if causal_lm.dtype == torch.bfloat16 else "float32"
        self._run: nn.Module = start_frozen_engine(model, execution, dtype) if is_sharded(causal_lm) else model
        self._model = model
        set_attention(causal_lm, execution)  # tries the decoder, whose weights the engine may have to gather
        compile_layers(causal_lm, execution)
        self._execution = execution

    @property
    def causal_lm(self) -> PreTrainedModel:
        """The model with the parameter names of its folder."""
        return self._model.causal_lm

    def logprobs(self, batch: TrainBatch) -> Tensor:
        """`(B, T)` log-probabilities of the response tokens, 0 elsewhere."""
        return score(self._model, self._forward, batch, self._execution)

    def _forward(self, micro: TrainBatch) -> Tensor:
        return self._run(*model_inputs(micro, self._execution), entropy_gradient=False)[0]
